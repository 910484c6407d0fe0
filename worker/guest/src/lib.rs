//! The agent in a machine, and what a host needs to put it there and to exchange files with it.
//!
//! Owns the agent (`agent`), streams of files for both sides (`files`), the initial RAM disk that a machine boots the agent from
//! (`initramfs`), reading the kernel's list of mounts for both (`mountinfo`), and the first process of a container, which is the same program (`container`). Does not own the protocol (`volley_jobspecs::wire::guest`), its host side or any machine: those are the worker's.

pub mod agent;
pub mod container;
pub mod files;
pub mod initramfs;
pub mod mountinfo;
mod program;
