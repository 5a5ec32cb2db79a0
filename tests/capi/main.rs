//! The C face: the header, what the shared library shows, and C programs that use both.

mod library;

mod exports;
mod header;
mod programs;
