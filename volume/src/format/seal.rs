//! Encryption and compression of everything that is stored.
//!
//! Owns keys, how they are wrapped and derived, nonces, and the codec. Does not own where a sealed thing lies.
//!
//! **Keys.** A family of volumes (a volume, the clones of its snapshots, theirs) has one random key of 256 bits. It lies in each head and snapshot,
//! wrapped with the cluster's key. No data is sealed with it: each object has a key of its own, BLAKE3's `derive_key` of (family's key, salt, name).
//! The salt is 16 random bytes of each writing of an object, so that even a name that was used twice by mistake has two keys.
//!
//! **Nonces** count: AES-256-GCM, 12 bytes: the kind (1), zeros (3), the index (8), where the index is the place within the object, and each place is
//! written once. So no nonce can meet another under one key, and none is stored.
//!
//! **Authenticated with each piece**: the object's name, the kind, the index, and what the caller adds, so that nothing opens in another's place.

use minicbor::{Decode, Encode};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};
use volley_jobspecs::ids::VolumeId;

use super::FormatError;

/// Bytes that sealing adds.
pub const TAG_BYTES: usize = 16;
/// Random bytes of each writing of an object.
pub type Salt = [u8; 16];
/// Longest name of an object, in bytes: `vol/<id>/p/<epoch>-<seq>-<n>` has 79.
const NAME_BYTES_MAX: usize = 112;
/// Most bytes that callers add to a piece of data: its codec and its plain size.
const ADDED_BYTES_MAX: usize = 8;
/// zstd's level: what is uploaded is packed while the guest waits for room; higher levels take twice the time for a tenth less.
const LEVEL: i32 = 1;
/// A packed form must save a 20th, or reading it back is not worth the work.
const GAIN_MIN: usize = 20;
/// Contexts of the derivations; never used for anything else.
const OBJECT_CONTEXT: &str = "volley 2026-11-30 volume object key";
const WRAP_CONTEXT: &str = "volley 2026-11-30 volume key wrap";
const KEY_ID_CONTEXT: &str = "volley 2026-11-30 volume cluster key id";

/// What a sealed piece is. Part of its nonce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Blocks of the disk, in a pack.
    Extent = 1,
    /// A pack's table.
    Table = 2,
    /// A page of a map.
    Page = 3,
    /// A map's root page.
    Root = 4,
    /// The sealed part of a record.
    Record = 5,
    /// The header of a record of the log, which is only authenticated.
    LogHeader = 6,
    /// A block in the log.
    LogBlock = 7,
    /// A block in the host's cache.
    CacheBlock = 8,
    /// A family's key, wrapped.
    Key = 9,
}

/// The names of the cluster's keys: 8 bytes of their BLAKE3.
pub type KeyId = [u8; 8];

#[derive(Clone)]
struct ClusterKey {
    id: KeyId,
    key: [u8; 32],
}

/// The cluster's keys: the first wraps, all unwrap.
#[derive(Clone)]
pub struct ClusterKeys(Vec<ClusterKey>);

impl std::fmt::Debug for ClusterKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.iter().map(|key| hex::encode(key.id))).finish()
    }
}

impl ClusterKeys {
    /// From keys of 32 bytes, the one that wraps first.
    ///
    /// # Errors
    /// [`FormatError::Make`] if there is none.
    pub fn new(keys: &[[u8; 32]]) -> Result<Self, FormatError> {
        if keys.is_empty() {
            return Err(FormatError::Make { what: "a volume's key", why: "the cluster has no key for volumes".to_owned() });
        }
        Ok(Self(keys.iter().map(|key| ClusterKey { id: key_id(key), key: *key }).collect()))
    }

    /// From text: 64 digits in hex a line, empty lines and what begins with `#` left out.
    ///
    /// # Errors
    /// [`FormatError::Make`] for any other line, which is not shown.
    pub fn parse(text: &str) -> Result<Self, FormatError> {
        let lines = text.lines().map(str::trim).enumerate().filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let keys: Result<Vec<[u8; 32]>, FormatError> = lines
            .map(|(number, line)| {
                let mut key = [0; 32];
                let why = format!("line {} of the cluster's keys is not 64 digits in hex", number + 1);
                hex::decode_to_slice(line, &mut key).map(|()| key).map_err(|_| FormatError::Make { what: "a volume's key", why })
            })
            .collect();
        Self::new(&keys?)
    }
}

fn key_id(key: &[u8; 32]) -> KeyId {
    let hash = blake3::derive_key(KEY_ID_CONTEXT, key);
    let mut id = KeyId::default();
    id.copy_from_slice(&hash[..8]);
    id
}

/// A family's key as it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct WrappedKey {
    /// The first volume of the family, bound to it.
    #[n(0)]
    pub family: VolumeId,
    /// Which of the cluster's keys wraps it.
    #[cbor(n(1), with = "minicbor::bytes")]
    pub cluster_key: KeyId,
    /// Of this wrapping.
    #[cbor(n(2), with = "minicbor::bytes")]
    pub salt: Salt,
    /// The key and its tag.
    #[cbor(n(3), with = "minicbor::bytes")]
    pub sealed: [u8; 32 + TAG_BYTES],
}

/// The key of a family of volumes.
#[derive(Clone)]
pub struct FamilyKey([u8; 32]);

impl std::fmt::Debug for FamilyKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FamilyKey")
    }
}

impl FamilyKey {
    /// From 32 random bytes.
    #[must_use]
    pub fn new(random: [u8; 32]) -> Self {
        Self(random)
    }

    /// Wraps it with the cluster's first key. `salt`: fresh and random.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn wrap(&self, keys: &ClusterKeys, family: VolumeId, salt: Salt) -> Result<WrappedKey, FormatError> {
        let wrapping = keys.0.first().ok_or_else(|| FormatError::Make { what: "a volume's key", why: "no cluster key".to_owned() })?;
        let cipher = wrap_key(wrapping, family, salt)?;
        let mut sealed = [0; 32 + TAG_BYTES];
        let (key, tag) = sealed.split_at_mut(32);
        key.copy_from_slice(&self.0);
        tag.copy_from_slice(&cipher.seal(Kind::Key, 0, &[], key)?);
        Ok(WrappedKey { family, cluster_key: wrapping.id, salt, sealed })
    }

    /// Unwraps one.
    ///
    /// # Errors
    /// [`FormatError::ClusterKey`] when the host lacks the cluster's key, [`FormatError::Seal`].
    pub fn unwrap(wrapped: &WrappedKey, keys: &ClusterKeys) -> Result<Self, FormatError> {
        let Some(wrapping) = keys.0.iter().find(|key| key.id == wrapped.cluster_key) else {
            let held = keys.0.iter().map(|key| hex::encode(key.id)).collect::<Vec<_>>().join(", ");
            return Err(FormatError::ClusterKey { what: "a volume's key", wanted: hex::encode(wrapped.cluster_key), held });
        };
        let cipher = wrap_key(wrapping, wrapped.family, wrapped.salt)?;
        let (key, tag) = wrapped.sealed.split_at(32);
        let (mut plain, mut own_tag) = ([0; 32], [0; TAG_BYTES]);
        plain.copy_from_slice(key);
        own_tag.copy_from_slice(tag);
        cipher.open("a volume's key", Kind::Key, 0, &[], &mut plain, &own_tag)?;
        Ok(Self(plain))
    }

    /// The key of one writing of an object.
    ///
    /// # Errors
    /// [`FormatError::Make`] for a name that is too long.
    pub fn object(&self, name: &str, salt: &Salt) -> Result<ObjectKey, FormatError> {
        ObjectKey::derive(OBJECT_CONTEXT, &self.0, salt, name)
    }
}

fn wrap_key(key: &ClusterKey, family: VolumeId, salt: Salt) -> Result<ObjectKey, FormatError> {
    ObjectKey::derive(WRAP_CONTEXT, &key.key, &salt, &family.to_string())
}

/// Seals and opens the pieces of one object.
pub struct ObjectKey {
    cipher: LessSafeKey,
    name: Vec<u8>,
}

impl std::fmt::Debug for ObjectKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ObjectKey({})", String::from_utf8_lossy(&self.name))
    }
}

impl ObjectKey {
    fn derive(context: &str, key: &[u8; 32], salt: &Salt, name: &str) -> Result<Self, FormatError> {
        if name.len() > NAME_BYTES_MAX {
            return Err(FormatError::Make { what: "an object's key", why: format!("the name {name} is too long") });
        }
        // Key and salt have fixed sizes, so that the three can't be read in another way.
        let derived = *blake3::Hasher::new_derive_key(context).update(key).update(salt).update(name.as_bytes()).finalize().as_bytes();
        let unbound = UnboundKey::new(&AES_256_GCM, &derived);
        let unbound = unbound.map_err(|_| FormatError::Make { what: "an object's key", why: "the cipher refused it".to_owned() })?;
        Ok(Self { cipher: LessSafeKey::new(unbound), name: name.as_bytes().to_vec() })
    }

    /// Seals a piece where it lies; returns its tag. Each pair of kind and index may be sealed once.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn seal(&self, kind: Kind, index: u64, added: &[u8], bytes: &mut [u8]) -> Result<[u8; TAG_BYTES], FormatError> {
        let sealed =
            self.with_aad(kind, index, added, |aad| self.cipher.seal_in_place_separate_tag(nonce(kind, index), Aad::from(aad), bytes));
        let tag = sealed.map_err(|_| FormatError::Make { what: "a sealed piece", why: "the cipher refused it".to_owned() })?;
        let mut own = [0; TAG_BYTES];
        own.copy_from_slice(tag.as_ref());
        Ok(own)
    }

    /// Opens a piece where it lies. After an error its bytes mean nothing.
    ///
    /// # Errors
    /// [`FormatError::Seal`], said of `what`.
    pub fn open(
        &self,
        what: &'static str,
        kind: Kind,
        index: u64,
        added: &[u8],
        bytes: &mut [u8],
        tag: &[u8; TAG_BYTES],
    ) -> Result<(), FormatError> {
        let opened = self.with_aad(kind, index, added, |aad| {
            self.cipher.open_in_place_separate_tag(nonce(kind, index), Aad::from(aad), Tag::from(*tag), bytes, 0..).map(|_| ())
        });
        opened.map_err(|_| FormatError::Seal { what })
    }

    /// What is authenticated: name, kind, index, and what the caller adds. Names have one length a kind of object, and the rest has
    /// fixed sizes, so that two can't be read as one.
    fn with_aad<T>(&self, kind: Kind, index: u64, added: &[u8], act: impl FnOnce(&[u8]) -> T) -> T {
        let mut room = [0; NAME_BYTES_MAX + 1 + 8 + ADDED_BYTES_MAX];
        let parts = [&self.name, &[kind as u8][..], &index.to_le_bytes(), added];
        let len = parts.iter().map(|part| part.len()).sum();
        let Some(aad) = room.get_mut(..len) else { return act(&parts.concat()) };
        let mut rest = &mut *aad;
        for part in parts {
            let (place, behind) = rest.split_at_mut(part.len());
            place.copy_from_slice(part);
            rest = behind;
        }
        act(aad)
    }
}

fn nonce(kind: Kind, index: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[0] = kind as u8;
    bytes[4..].copy_from_slice(&index.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// How a piece is packed before it is sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Codec {
    /// As it is.
    Raw = 0,
    /// One zstd frame.
    Zstd = 1,
}

impl Codec {
    /// From its number.
    #[must_use]
    pub fn from_u8(number: u8) -> Option<Self> {
        match number {
            0 => Some(Self::Raw),
            1 => Some(Self::Zstd),
            _ => None,
        }
    }
}

/// Packs pieces; keeps zstd's memory from one to the next.
pub struct Packer(zstd::bulk::Compressor<'static>);

impl Packer {
    /// A new one.
    ///
    /// # Errors
    /// [`FormatError::Make`] without memory.
    pub fn new() -> Result<Self, FormatError> {
        let made = zstd::bulk::Compressor::new(LEVEL);
        made.map(Self).map_err(|e| FormatError::Make { what: "a packed piece", why: e.to_string() })
    }

    /// Packs a piece, if that saves enough.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn pack(&mut self, plain: &[u8]) -> Result<(Codec, Vec<u8>), FormatError> {
        let packed = self.0.compress(plain).map_err(|e| FormatError::Make { what: "a packed piece", why: e.to_string() })?;
        if packed.len() <= plain.len() - plain.len().div_ceil(GAIN_MIN) {
            Ok((Codec::Zstd, packed))
        } else {
            Ok((Codec::Raw, plain.to_vec()))
        }
    }
}

/// Unpacks a piece of `plain_bytes`, a number that the caller has checked against a limit.
///
/// # Errors
/// [`FormatError::Seal`] if it is not one of that size.
pub fn unpack(what: &'static str, codec: Codec, packed: Vec<u8>, plain_bytes: usize) -> Result<Vec<u8>, FormatError> {
    let plain = match codec {
        Codec::Raw => packed,
        Codec::Zstd => zstd::bulk::decompress(&packed, plain_bytes).map_err(|_| FormatError::Seal { what })?,
    };
    if plain.len() == plain_bytes { Ok(plain) } else { Err(FormatError::Seal { what }) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn keys(byte: u8) -> ClusterKeys {
        ClusterKeys::new(&[[byte; 32]]).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_piece_opens_in_its_place_only(plain in proptest::collection::vec(any::<u8>(), 0..5_000), index: u64, salt: Salt, at: prop::sample::Index, bit in 0u8..8) {
            let key = FamilyKey::new([7; 32]);
            let object = key.object("vol/a/p/1-2-3", &salt).unwrap();
            let mut sealed = plain.clone();
            let tag = object.seal(Kind::Extent, index, b"x", &mut sealed).unwrap();
            let open = |object: &ObjectKey, kind, index, added: &[u8], sealed: &[u8], tag| {
                let mut bytes = sealed.to_vec();
                object.open("it", kind, index, added, &mut bytes, &tag).map(|()| bytes)
            };
            prop_assert_eq!(open(&object, Kind::Extent, index, b"x", &sealed, tag), Ok(plain.clone()));
            let error = Err(FormatError::Seal { what: "it" });
            prop_assert_eq!(open(&object, Kind::Table, index, b"x", &sealed, tag), error.clone());
            prop_assert_eq!(open(&object, Kind::Extent, index ^ 1, b"x", &sealed, tag), error.clone());
            prop_assert_eq!(open(&object, Kind::Extent, index, b"y", &sealed, tag), error.clone());
            prop_assert_eq!(open(&key.object("vol/a/p/1-2-4", &salt).unwrap(), Kind::Extent, index, b"x", &sealed, tag), error.clone());
            let mut other = salt;
            other[0] ^= 1;
            prop_assert_eq!(open(&key.object("vol/a/p/1-2-3", &other).unwrap(), Kind::Extent, index, b"x", &sealed, tag), error.clone());
            let mut all = [&sealed[..], &tag].concat();
            let place = at.index(all.len());
            all[place] ^= 1 << bit;
            let (bytes, tag) = all.split_at(plain.len());
            prop_assert_eq!(open(&object, Kind::Extent, index, b"x", bytes, tag.try_into().unwrap()), error);
        }

        #[test]
        fn packing_and_unpacking_gives_the_same(plain in prop_oneof![proptest::collection::vec(any::<u8>(), 0..9_000), proptest::collection::vec(0u8..2, 0..9_000)]) {
            let (codec, packed) = Packer::new().unwrap().pack(&plain).unwrap();
            prop_assert!(packed.len() <= plain.len());
            prop_assert_eq!(unpack("it", codec, packed.clone(), plain.len()), Ok(plain.clone()));
            prop_assert!(unpack("it", codec, packed, plain.len() + 1).is_err());
        }
    }

    #[test]
    fn a_key_is_unwrapped_by_the_cluster_that_wrapped_it_for_its_family() {
        let (family, key) = (VolumeId([1; 16]), FamilyKey::new([9; 32]));
        let wrapped = key.wrap(&keys(1), family, [3; 16]).unwrap();
        assert_eq!(FamilyKey::unwrap(&wrapped, &keys(1)).unwrap().0, key.0);
        // A newer key in front: the old one still unwraps.
        assert!(FamilyKey::unwrap(&wrapped, &ClusterKeys::new(&[[2; 32], [1; 32]]).unwrap()).is_ok());
        assert!(matches!(FamilyKey::unwrap(&wrapped, &keys(2)), Err(FormatError::ClusterKey { .. })));
        let other = WrappedKey { family: VolumeId([2; 16]), ..wrapped.clone() };
        assert!(matches!(FamilyKey::unwrap(&other, &keys(1)), Err(FormatError::Seal { .. })));
        for at in 0..wrapped.sealed.len() {
            let mut damaged = wrapped.clone();
            damaged.sealed[at] ^= 1;
            assert!(FamilyKey::unwrap(&damaged, &keys(1)).is_err());
        }
    }

    #[test]
    fn cluster_keys_are_read_and_never_shown() {
        let text = format!("# the newest first\n{}\n\n{}\n", "ab".repeat(32), "cd".repeat(32));
        let parsed = ClusterKeys::parse(&text).unwrap();
        assert_eq!(parsed.0.len(), 2);
        assert_eq!(parsed.0[0].key, [0xAB; 32]);
        assert!(!format!("{parsed:?}").contains("abab"));
        for bad in ["", "abc", &"xy".repeat(32)] {
            assert!(!ClusterKeys::parse(bad).unwrap_err().to_string().contains("xy"), "{bad}");
        }
    }
}
