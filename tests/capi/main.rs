//! The C face: the header, the exports of the shared library, and C programs that use both.

mod library;

mod exports;
mod header;
mod programs;
