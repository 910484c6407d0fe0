//! Placeholder while the dependency set is built.
