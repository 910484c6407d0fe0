//! Images: from an OCI image to a read-only root disk, and the kernel that boots with it.
//!
//! An image is data from somebody else. Nothing of it is mounted, executed or unpacked onto a file system of this machine: its layers
//! are read as lists of entries (`layer`), added up in memory (`merge`), and written as one disk (`erofs`) whose contents are copied out
//! of the unpacked layers. Names and links of an image are never names on this machine.
//!
//! Owns all of that and where it is kept (`store`). Does not own machines, or who may use which image.

pub mod entry;
pub mod erofs;
pub mod find;
pub mod import;
pub mod kernel;
pub mod layer;
pub mod layout;
pub mod merge;
pub mod oci;
mod pack;
pub mod registry;
pub mod store;
pub mod unpack;
pub mod watch;

pub use import::{ImportError, Limits, Source, import, remove, remove_name};
pub use kernel::Kernel;
pub use store::{ImageNote, Store};
