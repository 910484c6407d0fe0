//! The coordinator's edges: the log, the lease, core NATS, RocksDB. Dumb on purpose: no decision about a job is made here.

pub mod bus;
pub mod checkpoint;
pub mod collect;
pub mod garbage;
pub mod items;
pub mod lease;
pub mod levels;
pub mod log;
pub mod objects;
pub mod restore;
pub mod rocks;
pub mod stream;
pub mod templates;
pub mod volumes;
