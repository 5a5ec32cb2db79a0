//! The C face.
