//! The agent as an ordinary process.
