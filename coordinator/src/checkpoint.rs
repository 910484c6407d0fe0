//! checkpoint: when one is made, what its manifest says, how far the log is trimmed, and what goes with old ones.
//!
//! Owns these decisions; all follow from the state and from what lies in the bucket. Does not own moving files (`io/checkpoint.rs`) or
//! building a directory from one (`io/restore.rs`).
//!
//! The files' keys are never used twice: each holds the sequence and a tag of the making that stored it. A checkpoint takes over
//! files only from the two newest recorded ones. What is deleted is named by no manifest from the oldest recorded one on, so even a
//! leader that was frozen in the middle of a deletion takes nothing away from a checkpoint that was made meanwhile.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::state::Head;

/// Records between two checkpoints: what a coordinator applies in a few seconds.
pub const RECORDS: u64 = 50_000;
/// Bytes of the log between two checkpoints: the log then stays near twice that.
pub const LOG_BYTES: u64 = 64 * 1024 * 1024;
/// Of a log with a limit, at most this part lies between two checkpoints: two such parts are kept, and submits need room besides.
pub const LOG_PART: u64 = 6;
/// How often the leader looks whether one is due.
pub const LOOK: Duration = Duration::from_secs(5);
/// Age from which a file that no manifest names was left by a making that died, in milliseconds: no making takes a day.
pub const ORPHAN_MS: i64 = 24 * 60 * 60 * 1000;
/// Form of the manifest.
pub const VERSION: &str = "volley/checkpoint/v1";
/// Largest manifest, in bytes: some thousands of files.
pub const MANIFEST_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// When checkpoints are made. Tests shorten it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Every {
    /// See [`RECORDS`].
    pub records: u64,
    /// See [`LOG_BYTES`].
    pub bytes: u64,
    /// See [`LOOK`].
    pub look: Duration,
}

impl Default for Every {
    fn default() -> Self {
        Self { records: RECORDS, bytes: LOG_BYTES, look: LOOK }
    }
}

/// A checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// [`VERSION`].
    pub version: String,
    /// Whose.
    pub cluster: String,
    /// The last record that was applied.
    pub sequence: u64,
    /// The level of its state.
    pub level: u32,
    /// Records that were passed over.
    pub skipped: BTreeSet<u64>,
    /// RocksDB's files.
    pub files: Vec<File>,
}

/// A file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct File {
    /// Its name in the directory.
    pub name: String,
    /// Its key in the bucket.
    pub key: String,
    /// Its size.
    pub bytes: u64,
    /// Its blake3, in hex.
    pub blake3: String,
}

/// Why a manifest can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// It is another form, or none.
    #[error("it is no manifest this build can read ({0})")]
    Form(String),
    /// It belongs to another cluster.
    #[error("it belongs to cluster {0}")]
    Cluster(String),
    /// A newer build made it.
    #[error("its level is {0}, above that of this build; install the newer build")]
    Level(u32),
    /// The log goes on too late.
    #[error("the log begins at record {first}, behind it")]
    Old {
        /// The log's first record.
        first: u64,
    },
    /// It has applied a record that is to be passed over.
    #[error("record {0}, which is to be passed over, is applied in it")]
    Skip(u64),
}

/// What a coordinator that loads a checkpoint goes by.
#[derive(Debug, Clone)]
pub struct Wanted<'a> {
    /// Its cluster.
    pub cluster: &'a str,
    /// The log's first record.
    pub first: u64,
    /// Records to pass over.
    pub skips: &'a BTreeSet<u64>,
}

impl Manifest {
    /// Reads one, and checks that it fits.
    ///
    /// # Errors
    /// [`Unfit`].
    pub fn read(bytes: &[u8], wanted: &Wanted<'_>) -> Result<Self, Unfit> {
        let found: Self = serde_json::from_slice(bytes).map_err(|e| Unfit::Form(e.to_string()))?;
        if found.version != VERSION {
            return Err(Unfit::Form(format!("version {:?}", found.version)));
        }
        if found.cluster != wanted.cluster {
            return Err(Unfit::Cluster(found.cluster));
        }
        if found.level > volley_jobspecs::wire::LEVEL {
            return Err(Unfit::Level(found.level));
        }
        if found.sequence + 1 < wanted.first {
            return Err(Unfit::Old { first: wanted.first });
        }
        if let Some(skip) = applied_skip(found.sequence, &found.skipped, wanted.skips) {
            return Err(Unfit::Skip(skip));
        }
        match found.files.iter().find(|file| !is_ours(&file.name)) {
            Some(file) => Err(Unfit::Form(format!("a file named {:?}", file.name))),
            None => Ok(found),
        }
    }
}

/// A record that is to be passed over, but was applied.
#[must_use]
pub fn applied_skip(applied: u64, skipped: &BTreeSet<u64>, skips: &BTreeSet<u64>) -> Option<u64> {
    skips.range(..=applied).find(|skip| !skipped.contains(skip)).copied()
}

/// Is this the name of a file that RocksDB makes? Nothing else is deleted from a directory, or put into one.
#[must_use]
pub fn is_ours(name: &str) -> bool {
    let numbered = |rest: &str| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit());
    match name.split_once(['-', '.']) {
        None => ["CURRENT", "IDENTITY", "LOCK", "LOG"].contains(&name),
        Some(("MANIFEST" | "OPTIONS", rest)) => numbered(rest.strip_suffix(".dbtmp").unwrap_or(rest)),
        Some(("LOG", rest)) => rest.strip_prefix("old.").is_some_and(numbered),
        Some((number, "sst" | "log" | "blob" | "dbtmp")) => numbered(number),
        Some(_) => false,
    }
}

/// Of RocksDB's files, those that a checkpoint has.
#[must_use]
pub fn belongs(name: &str) -> bool {
    is_ours(name) && name != "LOCK" && name != "LOG" && !name.starts_with("LOG.")
}

/// The log as the server tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Log {
    /// First sequence.
    pub first: u64,
    /// Last sequence.
    pub last: u64,
    /// Bytes used.
    pub bytes: u64,
    /// Most bytes.
    pub bytes_max: Option<u64>,
}

/// Is a checkpoint due? What a record takes in the log is taken to be the same for all.
#[must_use]
pub fn due(every: &Every, head: &Head, log: &Log) -> bool {
    let since = head.sequence.saturating_sub(head.checkpoints.last().copied().unwrap_or(log.first.saturating_sub(1)));
    let there = (log.last + 1).saturating_sub(log.first).max(1);
    let bytes = log.bytes / there * since;
    let part = log.bytes_max.map_or(u64::MAX, |max| max / LOG_PART);
    since >= every.records || (since > 0 && bytes >= every.bytes.min(part))
}

/// The first record that stays: the second newest checkpoint's, so that either of the two can be loaded. Never past the last record
/// of the leader, which the fence of the next one names; it says that the newest checkpoint is there, and so lies behind both.
#[must_use]
pub fn keep_from(head: &Head) -> Option<u64> {
    let second = head.checkpoints.iter().rev().nth(1)?;
    Some((*second).min(head.leader_sequence))
}

/// Files that no kept manifest names: those of manifests that go, and those that are old and nobody's.
#[must_use]
pub fn sweep(kept: &[Manifest], going: &[Manifest], there: &[(String, i64)], now_ms: i64) -> Vec<String> {
    let named: BTreeSet<&str> = kept.iter().flat_map(|m| m.files.iter().map(|f| f.key.as_str())).collect();
    let theirs: BTreeSet<&str> = going.iter().flat_map(|m| m.files.iter().map(|f| f.key.as_str())).collect();
    let goes = |(key, modified_ms): &&(String, i64)| {
        !named.contains(key.as_str()) && (theirs.contains(key.as_str()) || *modified_ms < now_ms.saturating_sub(ORPHAN_MS))
    };
    there.iter().filter(goes).map(|(key, _)| key.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(sequence: u64, checkpoints: &[u64]) -> Head {
        Head { sequence, checkpoints: checkpoints.to_vec(), leader_sequence: sequence, ..Head::default() }
    }

    fn manifest(sequence: u64, keys: &[&str]) -> Manifest {
        let file = |key: &&str| File { name: "000001.sst".into(), key: (*key).into(), bytes: 1, blake3: String::new() };
        Manifest {
            version: VERSION.into(),
            cluster: "c".into(),
            sequence,
            level: 1,
            skipped: BTreeSet::new(),
            files: keys.iter().map(file).collect(),
        }
    }

    #[test]
    fn three_are_kept_and_the_log_from_the_second_newest_on() {
        let mut head = head(100, &[]);
        assert_eq!(keep_from(&head), None);
        head.checkpointed(10);
        assert_eq!(keep_from(&head), None);
        [20, 20, 15, 30, 40].iter().for_each(|sequence| head.checkpointed(*sequence));
        assert_eq!(head.checkpoints, [20, 30, 40]);
        assert_eq!(keep_from(&head), Some(30));
        head.leader_sequence = 12;
        assert_eq!(keep_from(&head), Some(12), "the fence stays");
    }

    #[test]
    fn one_is_due_after_so_many_records_or_bytes() {
        let every = Every { records: 100, bytes: 10_000, look: LOOK };
        let log = |bytes, bytes_max| Log { first: 1, last: 200, bytes, bytes_max };
        assert!(!due(&every, &head(0, &[]), &Log { first: 0, last: 0, bytes: 0, bytes_max: None }));
        assert!(due(&every, &head(100, &[]), &log(0, None)));
        assert!(!due(&every, &head(199, &[100]), &log(0, None)));
        assert!(due(&every, &head(200, &[100]), &log(0, None)));
        assert!(!due(&every, &head(149, &[100]), &log(40_000, None)) && due(&every, &head(150, &[100]), &log(40_000, None)));
        assert!(due(&every, &head(110, &[100]), &log(20_000, Some(6_000))), "a small log is not filled");
    }

    #[test]
    fn what_a_kept_manifest_names_is_never_deleted() {
        let there: Vec<(String, i64)> = [("a", 0), ("b", 0), ("c", 0), ("d", 0), ("e", ORPHAN_MS)].map(|(k, at)| (k.to_owned(), at)).into();
        let found = sweep(&[manifest(2, &["a", "b"])], &[manifest(1, &["b", "c"])], &there, ORPHAN_MS + 5);
        assert_eq!(found, ["c", "d"]);
    }

    #[test]
    fn only_names_of_rocksdb_are_ours() {
        for ours in [
            "CURRENT",
            "LOCK",
            "LOG",
            "LOG.old.123",
            "IDENTITY",
            "MANIFEST-000005",
            "OPTIONS-000007",
            "OPTIONS-000007.dbtmp",
            "000012.sst",
            "000013.log",
            "000001.dbtmp",
        ] {
            assert!(is_ours(ours), "{ours}");
        }
        for other in [
            "", "..", "a.sst", ".sst", "../1.sst", "notes.txt", "MANIFEST-", "MANIFEST-x", "LOG.txt", "secrets.json", "1.sst/..",
            "CURRENT.bak",
        ] {
            assert!(!is_ours(other), "{other}");
        }
        assert!(belongs("CURRENT") && belongs("000013.log") && !belongs("LOG") && !belongs("LOCK") && !belongs("LOG.old.1"));
    }

    #[test]
    fn a_manifest_that_does_not_fit_is_refused() {
        let skips = BTreeSet::from([7]);
        let wanted = Wanted { cluster: "c", first: 11, skips: &skips };
        let good = Manifest { skipped: skips.clone(), ..manifest(10, &["k"]) };
        let read = |manifest: &Manifest| Manifest::read(&serde_json::to_vec(manifest).unwrap(), &wanted);
        assert_eq!(read(&good), Ok(good.clone()));
        assert_eq!(read(&Manifest { cluster: "x".into(), ..good.clone() }), Err(Unfit::Cluster("x".into())));
        assert_eq!(read(&Manifest { level: 99, ..good.clone() }), Err(Unfit::Level(99)));
        assert_eq!(read(&Manifest { sequence: 9, ..good.clone() }), Err(Unfit::Old { first: 11 }));
        assert_eq!(read(&Manifest { skipped: BTreeSet::new(), ..good.clone() }), Err(Unfit::Skip(7)));
        let mut escapes = good.clone();
        escapes.files[0].name = "../../etc/passwd".into();
        assert!(matches!(read(&escapes), Err(Unfit::Form(_))));
        assert!(matches!(Manifest::read(b"{}", &wanted), Err(Unfit::Form(_))));
    }
}
