//! Volumes in the API.
//!
//! Owns the shapes of requests and answers about volumes. What they mean is the coordinator's.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::spec::Flush;

api_type! {
    /// A volume to make.
    pub struct VolumeRequest {
        /// Its name: 1 to 128 of a-z A-Z 0-9 . _ -, beginning with a letter or digit.
        pub name: String,
        /// Bytes of the disk, 1 MiB to 16 TiB; rounded up to whole blocks of 4 KiB. Needed, unless it is a clone.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub size_bytes: Option<u64>,
        /// What a flush promises: `none`, `local` (default) or `s3`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(value_type = Option<String>)]
        pub flush: Option<Flush>,
        /// What it is a clone of: `volume@snapshot`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub from: Option<String>,
    }
}

api_type! {
    /// A snapshot to make of a volume as it was last accepted.
    pub struct SnapshotRequest {
        /// Its name, unique within the volume.
        pub name: String,
    }
}

api_type! {
    /// The size that a volume is to have.
    pub struct ResizeRequest {
        /// Bytes of the disk, up to 16 TiB and not fewer than now; rounded up to whole blocks of 4 KiB.
        pub size_bytes: u64,
    }
}

api_type! {
    /// A volume.
    pub struct VolumeView {
        /// Its name.
        pub name: String,
        /// Its id: never used again, while a name may be.
        pub id: String,
        /// Bytes of the disk.
        pub size_bytes: u64,
        /// How often what was written has been accepted.
        pub generation: u64,
        /// When it was made (RFC 3339).
        pub created: String,
        /// Who has it, or what it waits for; left out: it is free.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub held_by: Option<String>,
        /// The size it is to have in a moment, when its head in the bucket says so too. Until then nobody is given it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub growing_to_bytes: Option<u64>,
        /// Its snapshots, by name.
        pub snapshots: Vec<SnapshotView>,
    }
}

api_type! {
    /// What a collection found and did.
    pub struct CollectedView {
        /// Volumes in the bucket, deleted ones too.
        pub volumes: u64,
        /// Snapshots in the bucket.
        pub snapshots: u64,
        /// Objects of both.
        pub objects: u64,
        /// Their bytes.
        pub bytes: u64,
        /// Objects that nobody needs: they are deleted by the first run that finds them so a day later.
        pub condemned_objects: u64,
        /// Their bytes.
        pub condemned_bytes: u64,
        /// Objects that were deleted; with `dryRun`: that would have been.
        pub deleted_objects: u64,
        /// Their bytes.
        pub deleted_bytes: u64,
        /// Bytes stored for each tenant, condemned ones left out.
        pub stored_bytes: BTreeMap<String, u64>,
    }
}

api_type! {
    /// How a verification ended.
    pub struct VerifiedView {
        /// Was everything read, or the map only?
        pub deep: bool,
        /// Blocks of 4 KiB that are stored.
        pub blocks: u64,
        /// Objects that hold them.
        pub packs: u64,
        /// Bytes of those that were read.
        pub bytes: u64,
        /// The first thing that is wrong; left out: nothing is.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub damage: Option<DamageView>,
    }
}

api_type! {
    /// Something that is wrong with a volume in the bucket.
    pub struct DamageView {
        /// The object's key, below the cluster's prefix.
        pub object: String,
        /// What is wrong with it.
        pub what: String,
    }
}

api_type! {
    /// A line about a verification: how far it is, or, in the last one, how it ended.
    pub struct VerifyLine {
        /// Objects that were read.
        pub packs: u64,
        /// Objects to be read; 0 while that is not known.
        pub packs_all: u64,
        /// Bytes that were read.
        pub bytes: u64,
        /// How it ended.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub ended: Option<VerifiedView>,
        /// Why it could not be ended.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub error: Option<super::ErrorBody>,
    }
}

api_type! {
    /// A snapshot of a volume.
    pub struct SnapshotView {
        /// Its name.
        pub name: String,
        /// Its id.
        pub id: String,
        /// Bytes of the disk.
        pub size_bytes: u64,
        /// When it was made (RFC 3339).
        pub created: String,
    }
}
