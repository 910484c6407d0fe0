//! The cluster's keys for shared templates, and what is derived from them for each owner.
//!
//! Owns the key file and the derivation. Pure but for reading and making that file. Does not own what is sealed or signed with them
//! (`chunks`, `manifest`).
//!
//! The file has one key a line, 64 hexadecimal digits; lines that begin with `#` are skipped. The first one is written with, all are read
//! with: a new key goes to the top, on all workers in two steps (first added below, then moved up), and an old one leaves when nothing that
//! it sealed is wanted any more. Whoever has a key can read and forge templates of all tenants; workers have it, and nobody else.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::Owner;

/// Bytes of a key, and of what is derived from it: the strength of the cipher and of the hash.
const KEY_BYTES: usize = 32;
/// Keys that a file may have: one in use, one that comes, and some that only read.
const KEYS_MAX: usize = 16;
/// Most bytes of a key file; more is something else.
const FILE_BYTES_MAX: u64 = 16 << 10;
/// Mode bits that let anybody but the owner read or write.
const OTHERS: u32 = 0o077;

/// Why there are no keys.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// The file.
    #[error("the key file for templates, {}: {source}", .path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Others can read it.
    #[error("the key file for templates, {}, has the mode {mode:o}; only its owner may read it: chmod 600 {}", .path.display(), .path.display())]
    Open {
        /// Which.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// A line is no key.
    #[error("line {line} of the keys for templates is no key; one is 64 hexadecimal digits (openssl rand -hex 32)")]
    Line {
        /// Which, from 1.
        line: usize,
    },
    /// None, or too many.
    #[error("there are {found} keys for templates; there must be 1 to {KEYS_MAX}, one a line")]
    Count {
        /// How many.
        found: usize,
    },
    /// No randomness.
    #[error("the system gives no random bytes for a key: {0}")]
    Random(String),
}

/// Names a key without saying what it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyId(pub [u8; 8]);

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The cluster's keys; the first is written with.
#[derive(Clone)]
pub struct Keys(Vec<[u8; KEY_BYTES]>);

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(id_of)).finish()
    }
}

impl Keys {
    /// Reads keys from text, as a file or an environment variable has it.
    ///
    /// # Errors
    /// [`KeysError`].
    pub fn parse(text: &str) -> Result<Self, KeysError> {
        let lines = text.lines().enumerate().map(|(at, line)| (at + 1, line.trim()));
        let keys = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')).map(|(line, digits)| {
            let mut key = [0; KEY_BYTES];
            hex::decode_to_slice(digits, &mut key).map(|()| key).map_err(|_| KeysError::Line { line })
        });
        let keys: Vec<_> = keys.collect::<Result<_, _>>()?;
        if !(1..=KEYS_MAX).contains(&keys.len()) {
            return Err(KeysError::Count { found: keys.len() });
        }
        Ok(Self(keys))
    }

    /// Reads a key file, which nobody but its owner may read.
    ///
    /// # Errors
    /// [`KeysError`].
    pub fn read(path: &Path) -> Result<Self, KeysError> {
        let at = |source| KeysError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(at)?;
        let mode = file.metadata().map_err(at)?.mode() & 0o7777;
        if mode & OTHERS != 0 {
            return Err(KeysError::Open { path: path.to_owned(), mode });
        }
        let mut text = String::new();
        file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(at)?;
        Self::parse(&text)
    }

    /// Reads a key file, or makes one with a fresh key when there is none: for a cluster of one host. Of two that make it at once, one
    /// wins and both read the same.
    ///
    /// # Errors
    /// [`KeysError`].
    pub fn read_or_make(path: &Path) -> Result<Self, KeysError> {
        let at = |source| KeysError::Io { path: path.to_owned(), source };
        match Self::read(path) {
            Err(KeysError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            read => return read,
        }
        let (mut key, mut nonce) = ([0; KEY_BYTES], [0; 8]);
        getrandom::fill(&mut key).and_then(|()| getrandom::fill(&mut nonce)).map_err(|e| KeysError::Random(e.to_string()))?;
        // Whole or not at all: under another name first, and linked where no other one stands.
        let new = path.with_extension(format!("new-{}", hex::encode(nonce)));
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new).map_err(at)?;
        let written = writeln!(file, "{}", hex::encode(key)).and_then(|()| file.sync_all());
        let linked = written.and_then(|()| std::fs::hard_link(&new, path));
        std::fs::remove_file(&new).map_err(at)?;
        match linked {
            Err(why) if why.kind() != io::ErrorKind::AlreadyExists => Err(at(why)),
            _ => Self::read(path),
        }
    }

    /// What is written with for an owner.
    #[must_use]
    pub fn current(&self, owner: &Owner) -> OwnerKey {
        // There is at least one.
        derive(&self.0.first().copied().unwrap_or_default(), owner)
    }

    /// What was written with under an id, if it is there.
    #[must_use]
    pub fn find(&self, id: KeyId, owner: &Owner) -> Option<OwnerKey> {
        self.0.iter().find(|key| id_of(key) == id).map(|key| derive(key, owner))
    }
}

/// One owner's part of a key. What is sealed or signed for one owner is nothing under another one's, so a bucket's objects can't be moved
/// between tenants.
#[derive(Clone)]
pub struct OwnerKey {
    /// Which of the cluster's.
    pub id: KeyId,
    /// Names chunks: their keyed hash. Without the key a name does not tell whether a known file is in it.
    pub(super) naming: [u8; KEY_BYTES],
    /// Seals chunks.
    pub(super) sealing: [u8; KEY_BYTES],
    /// Signs manifests.
    pub(super) signing: [u8; KEY_BYTES],
}

impl fmt::Debug for OwnerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnerKey").field("id", &self.id).finish_non_exhaustive()
    }
}

fn id_of(key: &[u8; KEY_BYTES]) -> KeyId {
    let mut id = [0; 8];
    id.copy_from_slice(&blake3::derive_key("volley templates: a key's id", key)[..8]);
    KeyId(id)
}

fn derive(key: &[u8; KEY_BYTES], owner: &Owner) -> OwnerKey {
    let part = |context: &str| {
        let mut hasher = blake3::Hasher::new_derive_key(context);
        hasher.update(key);
        match owner {
            Owner::Public => hasher.update(b"p"),
            Owner::Tenant(tenant) => hasher.update(b"t").update(tenant.as_str().as_bytes()),
        };
        *hasher.finalize().as_bytes()
    };
    OwnerKey {
        id: id_of(key),
        naming: part("volley templates: names of chunks"),
        sealing: part("volley templates: sealing of chunks"),
        signing: part("volley templates: signing of manifests"),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use volley_jobspecs::ids::TenantId;

    use super::*;

    #[test]
    fn keys_are_read_and_what_is_no_key_is_named() {
        let (one, other) = ("11".repeat(32), "2a".repeat(32));
        let keys = Keys::parse(&format!("# ours\n{one}\n\n  {other}  \n")).unwrap();
        let (public, tenant) = (Owner::Public, Owner::Tenant(TenantId::new("p").unwrap()));
        let current = keys.current(&tenant);
        assert_eq!(keys.find(current.id, &tenant).unwrap().sealing, current.sealing);
        assert_ne!(keys.current(&public).sealing, current.sealing, "each owner has its own");
        assert!(current.sealing != current.signing && current.naming != current.signing);
        assert_ne!(Keys::parse(&other).unwrap().current(&tenant).id, current.id);
        assert!(Keys::parse(&other).unwrap().find(current.id, &tenant).is_none());
        assert!(!format!("{keys:?} {current:?}").contains("11111111"), "no key is printed");
        assert!(matches!(Keys::parse("# none\n"), Err(KeysError::Count { found: 0 })));
        assert!(matches!(Keys::parse(&format!("{one}\n{}", &one[1..])), Err(KeysError::Line { line: 2 })));
        assert!(matches!(Keys::parse(&format!("{one}\n").repeat(17)), Err(KeysError::Count { found: 17 })));
    }

    #[test]
    fn a_key_file_is_made_once_and_is_its_owners_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("templates.key");
        let made = Keys::read_or_make(&path).unwrap();
        assert_eq!(made.0, Keys::read_or_make(&path).unwrap().0);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        let why = Keys::read_or_make(&path).unwrap_err().to_string();
        assert!(why.contains("has the mode 640") && why.ends_with(&format!("chmod 600 {}", path.display())), "{why}");
        assert!(matches!(Keys::read(&dir.path().join("none")), Err(KeysError::Io { .. })));
    }
}
