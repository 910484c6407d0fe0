//! A guest that says anything.
