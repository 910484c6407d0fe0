//! What a VMM's process can't do, tried as one.
