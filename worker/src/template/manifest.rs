//! The manifest of a shared template: what it was made of, which chunks it has, who built it; and the signature over all of it.
//!
//! Owns its bytes and every check of them. Pure: reads and writes are `share`'s.
//!
//! Bytes: `VOLLEYTM`, version (2, little endian), key id (8), signature (32), then the body in CBOR with numbered fields. The signature
//! covers all that is not the signature, and is checked before the body is decoded. The recipe is there in clear: it holds no secrets.
//!
//! **Signed with a keyed hash** (BLAKE3) under a key that is derived from the cluster's, not with a key pair of the builder. It keeps out
//! whoever can write to the bucket, which is what it is for. Workers trust each other: each holds the key that opens the chunks, builds
//! templates that others run, and reports results. A builder's own key pair would say which worker built a bad one, and want a registry of
//! workers' keys that the cluster does not have; the builder's name is in the signed body.
//! What it does not keep out: an older manifest of the same name that is put back. That is a template of the same recipe.

use std::collections::BTreeSet;

use minicbor::bytes::ByteArray;
use minicbor::{Decode, Encode};
use volley_jobspecs::wire;

use super::chunks::{self, CHUNK_BYTES_READ, ChunkName};
use super::keys::{KeyId, Keys, OwnerKey};
use super::recipe::{Owner, Recipe, TemplateName, WarmUp};
use crate::vmm::{Identity, SLOTS, Size};

/// The version of what is written, and the only one that is read.
pub const VERSION: u16 = 1;
/// Most bytes of a manifest: 70 for each chunk, so 200,000 of them, which is 200 GiB of written memory.
pub const MANIFEST_BYTES_MAX: u64 = 14 << 20;
const MAGIC: [u8; 8] = *b"VOLLEYTM";
const HEAD_BYTES: usize = MAGIC.len() + 2 + 8;
const SIGNATURE_BYTES: usize = 32;

/// Why a manifest is of no use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// Not one of ours.
    #[error("it is no manifest of a template ({0} bytes)")]
    Form(usize),
    /// Of another build of Volley.
    #[error("it has the version {0}, this build reads {VERSION}")]
    Version(u16),
    /// Signed with a key that is not in the key file.
    #[error("it is signed with the key {0}, which is not in the key file")]
    Key(KeyId),
    /// Changed, or another owner's.
    #[error("its signature does not fit it: it was changed, or is another tenant's")]
    Signature,
    /// Signed, and not what it should be: a mistake of its builder.
    #[error("it is signed, but {0}")]
    Nonsense(&'static str),
}

impl ManifestError {
    /// Is it another build's or another key's, and good for those who have them? Then it is left where it is.
    #[must_use]
    pub fn is_foreign(&self) -> bool {
        match self {
            Self::Version(_) | Self::Key(_) => true,
            Self::Form(_) | Self::Signature | Self::Nonsense(_) => false,
        }
    }
}

/// A command of the warm-up.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct WarmUpNote {
    /// Program and arguments.
    #[n(0)]
    pub argv: Vec<String>,
    /// Its environment, besides the image's.
    #[n(1)]
    pub env: Vec<(String, String)>,
}

/// A recipe, for people and to be compared: every field of [`Recipe`].
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct RecipeNote {
    /// The tenant; none: everybody's.
    #[n(0)]
    pub tenant: Option<String>,
    /// The image's digest, in hex.
    #[n(1)]
    pub image: String,
    /// Its root disk's.
    #[n(2)]
    pub root: String,
    /// The kernel's BLAKE3.
    #[n(3)]
    pub kernel: ByteArray<32>,
    /// The RAM disk's.
    #[n(4)]
    pub initrd: ByteArray<32>,
    /// Words for the kernel's command line.
    #[n(5)]
    pub words: String,
    /// Virtual processors.
    #[n(6)]
    pub vcpus: u8,
    /// Memory in bytes.
    #[n(7)]
    pub memory_bytes: u64,
    /// The warm-up.
    #[n(8)]
    pub warm_up: Vec<WarmUpNote>,
    /// Do its processes live on?
    #[n(9)]
    pub keep_processes: bool,
    /// The VMM.
    #[n(10)]
    pub vmm: String,
    /// Its version.
    #[n(11)]
    pub version: String,
    /// What executes.
    #[n(12)]
    pub accelerator: String,
    /// The machine type.
    #[n(13)]
    pub machine: String,
    /// The processor model, as the VMM names it.
    #[n(14)]
    pub cpu: String,
    /// The host's processor, where the guest's depends on it.
    #[n(15)]
    pub processor: String,
    /// The device list's format.
    #[n(16)]
    pub format: u32,
    /// Slots for disks.
    #[n(17)]
    pub slots: u32,
}

impl From<&Recipe> for RecipeNote {
    fn from(recipe: &Recipe) -> Self {
        let Recipe { owner, image, root, kernel, initrd, words, size, warm_up, keep_processes, vmm, processor } = recipe;
        let Size { vcpus, memory_bytes } = *size;
        let Identity { vmm: kind, version, accelerator, machine, cpu, format } = vmm;
        Self {
            tenant: match owner {
                Owner::Public => None,
                Owner::Tenant(tenant) => Some(tenant.as_str().to_owned()),
            },
            image: image.hex().to_owned(),
            root: root.hex().to_owned(),
            kernel: ByteArray::from(*kernel),
            initrd: ByteArray::from(*initrd),
            words: words.clone(),
            vcpus,
            memory_bytes,
            warm_up: warm_up.iter().map(|WarmUp { argv, env }| WarmUpNote { argv: argv.clone(), env: env.clone() }).collect(),
            keep_processes: *keep_processes,
            vmm: kind.to_string(),
            version: version.to_string(),
            accelerator: accelerator.as_str().to_owned(),
            machine: (*machine).to_owned(),
            cpu: (*cpu).to_owned(),
            processor: processor.clone(),
            format: *format,
            slots: u32::try_from(SLOTS).unwrap_or(u32::MAX),
        }
    }
}

/// A piece of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct ChunkNote {
    /// Its number: the so-manieth `chunk_bytes` of the file.
    #[n(0)]
    pub piece: u32,
    /// Its name.
    #[n(1)]
    pub name: ByteArray<32>,
    /// Bytes of its object.
    #[n(2)]
    pub stored: u32,
}

impl ChunkNote {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> ChunkName {
        ChunkName(*self.name)
    }
}

/// A file of a snapshot. Pieces that are not listed are zeros.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct FileNote {
    /// Its size.
    #[n(0)]
    pub bytes: u64,
    /// The size of a piece.
    #[n(1)]
    pub chunk_bytes: u32,
    /// The keyed BLAKE3 of all of it: size, and number and plain bytes of each piece.
    #[n(2)]
    pub hash: ByteArray<32>,
    /// Its pieces, by their numbers.
    #[n(3)]
    pub chunks: Vec<ChunkNote>,
}

impl FileNote {
    /// Plain bytes of its pieces.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        let of = |chunk: &ChunkNote| chunks::range(self.bytes, self.chunk_bytes, chunk.piece);
        self.chunks.iter().map(of).map(|range| range.end - range.start).sum()
    }

    fn check(&self) -> Result<(), ManifestError> {
        let nonsense = |why| Err(ManifestError::Nonsense(why));
        if !CHUNK_BYTES_READ.contains(&self.chunk_bytes) {
            return nonsense("its chunks have a size that this build does not read");
        }
        let in_order = self.chunks.windows(2).all(|pair| matches!(pair, [one, next] if one.piece < next.piece));
        if !in_order || self.chunks.iter().any(|chunk| chunks::range(self.bytes, self.chunk_bytes, chunk.piece).is_empty()) {
            return nonsense("its chunks are out of order or past the end of their file");
        }
        Ok(())
    }
}

/// Who built it.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct Built {
    /// The worker's name.
    #[n(0)]
    pub by: String,
    /// When, in milliseconds since the Unix epoch, by its clock.
    #[n(1)]
    pub at_ms: u64,
    /// How long it took, in milliseconds, from the boot to the trial's answer.
    #[n(2)]
    pub took_ms: u64,
    /// The worker's build of Volley.
    #[n(3)]
    pub build: String,
}

/// A shared template.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct Manifest {
    /// Its name.
    #[n(0)]
    pub name: ByteArray<32>,
    /// What it was made of.
    #[n(1)]
    pub recipe: RecipeNote,
    /// Processes of the warm-up that live on in it.
    #[n(2)]
    pub kept_processes: u32,
    /// Its machine's memory.
    #[n(3)]
    pub memory: FileNote,
    /// The state of its devices.
    #[n(4)]
    pub state: FileNote,
    /// Who built it.
    #[n(5)]
    pub built: Built,
}

impl Manifest {
    /// Its template's name.
    #[must_use]
    pub fn name(&self) -> TemplateName {
        TemplateName(*self.name)
    }

    /// Its files, each with what it is called.
    #[must_use]
    pub fn files(&self) -> [(&'static str, &FileNote); 2] {
        [("memory", &self.memory), ("state", &self.state)]
    }

    /// Plain bytes of all its chunks: what a host reads and keeps.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.files().iter().map(|(_, file)| file.data_bytes()).sum()
    }

    /// The names of its chunks, each once, with its object's bytes.
    #[must_use]
    pub fn chunks(&self) -> BTreeSet<(ChunkName, u32)> {
        self.files().iter().flat_map(|(_, file)| &file.chunks).map(|chunk| (chunk.name(), chunk.stored)).collect()
    }

    /// Its bytes, signed.
    #[must_use]
    pub fn sign(&self, key: &OwnerKey) -> Vec<u8> {
        let mut head = Vec::with_capacity(HEAD_BYTES);
        head.extend_from_slice(&MAGIC);
        head.extend_from_slice(&VERSION.to_le_bytes());
        head.extend_from_slice(&key.id.0);
        let body = wire::encode(self);
        let signature = sign(key, &head, &body);
        [&head[..], signature.as_bytes(), &body].concat()
    }

    /// Checks the signature, then reads it. What key it was signed with.
    ///
    /// # Errors
    /// [`ManifestError`].
    pub fn verify(keys: &Keys, owner: &Owner, bytes: &[u8]) -> Result<(Self, OwnerKey), ManifestError> {
        let form = || ManifestError::Form(bytes.len());
        let (head, rest) = bytes.split_at_checked(HEAD_BYTES).ok_or_else(form)?;
        let (magic, fields) = head.split_first_chunk::<8>().ok_or_else(form)?;
        let (version, id) = fields.split_first_chunk::<2>().ok_or_else(form)?;
        let id = KeyId(id.try_into().map_err(|_| form())?);
        if *magic != MAGIC {
            return Err(form());
        }
        // Where the rest begins, and how it is signed, is this version's.
        if u16::from_le_bytes(*version) != VERSION {
            return Err(ManifestError::Version(u16::from_le_bytes(*version)));
        }
        let key = keys.find(id, owner).ok_or(ManifestError::Key(id))?;
        let (signature, body) = rest.split_first_chunk::<SIGNATURE_BYTES>().ok_or_else(form)?;
        // Compared in constant time.
        if sign(&key, head, body) != blake3::Hash::from_bytes(*signature) {
            return Err(ManifestError::Signature);
        }
        let manifest: Self = wire::decode("manifest", body).map_err(|_| ManifestError::Nonsense("its body can't be read"))?;
        manifest.memory.check()?;
        manifest.state.check()?;
        Ok((manifest, key))
    }

    /// Is it of this recipe? A signed manifest that lies under another's name is none of ours.
    ///
    /// # Errors
    /// [`ManifestError::Nonsense`].
    pub fn is_of(&self, recipe: &Recipe) -> Result<(), ManifestError> {
        if self.name() != recipe.name() || self.recipe != RecipeNote::from(recipe) {
            return Err(ManifestError::Nonsense("it is of another recipe than the one it lies under"));
        }
        Ok(())
    }
}

fn sign(key: &OwnerKey, head: &[u8], body: &[u8]) -> blake3::Hash {
    blake3::Hasher::new_keyed(&key.signing).update(head).update(body).finalize()
}

/// The hash of a whole file, piece by piece.
#[derive(Debug)]
pub struct FileHash(blake3::Hasher);

impl FileHash {
    /// Of a file of this size.
    #[must_use]
    pub fn new(key: &OwnerKey, bytes: u64) -> Self {
        let mut hasher = blake3::Hasher::new_keyed(&key.naming);
        hasher.update(b"file").update(&bytes.to_le_bytes());
        Self(hasher)
    }

    /// A piece that is not zeros; in order.
    pub fn add(&mut self, piece: u32, plain: &[u8]) {
        self.0.update(&piece.to_le_bytes()).update(&(plain.len() as u64).to_le_bytes()).update(plain);
    }

    /// The hash.
    #[must_use]
    pub fn end(&self) -> [u8; 32] {
        *self.0.finalize().as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use volley_jobspecs::ids::TenantId;

    use super::*;
    use crate::template::recipe;

    fn keys() -> Keys {
        Keys::parse(&"5c".repeat(32)).unwrap()
    }

    prop_compose! {
        fn file()(pieces in proptest::collection::btree_set(0u32..50, 0..5), rest in 1u64..65_536, byte: u8) -> FileNote {
            let bytes = pieces.last().map_or(0, |last| u64::from(*last) * 65_536) + rest;
            let note = |piece| ChunkNote { piece, name: ByteArray::from([byte; 32]), stored: u32::from(byte) };
            FileNote { bytes, chunk_bytes: 65_536, hash: ByteArray::from([byte; 32]), chunks: pieces.into_iter().map(note).collect() }
        }
    }

    prop_compose! {
        fn manifest()(recipe in recipe::tests::recipe(), kept in 0u32..3, memory in file(), state in file(), at_ms: u64) -> (Recipe, Manifest) {
            let built = Built { by: "w1".into(), at_ms, took_ms: 3_000, build: "0.1.0".into() };
            let note = RecipeNote::from(&recipe);
            let name = ByteArray::from(recipe.name().0);
            (recipe, Manifest { name, recipe: note, kept_processes: kept, memory, state, built })
        }
    }

    /// A manifest with one field changed.
    fn changed(manifest: &Manifest, field: usize) -> Option<Manifest> {
        let mut new = manifest.clone();
        let recipe = &mut new.recipe;
        match field {
            0 => new.name = ByteArray::from([9; 32]),
            1 => new.kept_processes += 9,
            2 => new.memory.bytes += 1,
            3 => new.memory.chunk_bytes *= 2,
            4 => new.memory.hash = ByteArray::from((*new.memory.hash).map(|byte| byte ^ 1)),
            5 => new.memory.chunks.push(ChunkNote { piece: 99, name: ByteArray::from([1; 32]), stored: 9 }),
            6 => new.state.chunks.first_mut().map(|chunk| chunk.name = ByteArray::from((*chunk.name).map(|byte| byte ^ 1)))?,
            7 => new.state.chunks.first_mut()?.stored += 1,
            8 => new.state.bytes += 1,
            9 => new.built.by.push('x'),
            10 => new.built.at_ms ^= 1,
            11 => new.built.took_ms += 1,
            12 => new.built.build.push('x'),
            13 => recipe.tenant = Some("z".into()),
            14 => recipe.image.push('0'),
            15 => recipe.root.push('0'),
            16 => recipe.kernel = ByteArray::from([9; 32]),
            17 => recipe.initrd = ByteArray::from([9; 32]),
            18 => recipe.words.push('x'),
            19 => recipe.vcpus += 1,
            20 => recipe.memory_bytes += 1,
            21 => recipe.warm_up.push(WarmUpNote { argv: vec!["x".into()], env: Vec::new() }),
            22 => recipe.keep_processes = !recipe.keep_processes,
            23 => recipe.vmm.push('x'),
            24 => recipe.version.push('1'),
            25 => recipe.accelerator.push('x'),
            26 => recipe.machine.push('x'),
            27 => recipe.cpu.push('x'),
            28 => recipe.processor.push('x'),
            29 => recipe.format += 9,
            30 => recipe.slots += 1,
            _ => return None,
        }
        Some(new)
    }
    const FIELDS: usize = 31;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn a_manifest_is_read_as_it_was_written((recipe, manifest) in manifest()) {
            let bytes = manifest.sign(&keys().current(&recipe.owner));
            let (read, key) = Manifest::verify(&keys(), &recipe.owner, &bytes).unwrap();
            prop_assert_eq!(&read, &manifest);
            prop_assert_eq!(key.id, keys().current(&recipe.owner).id);
            prop_assert!(read.is_of(&recipe).is_ok());
            // Another owner's key does not fit, nor another cluster's.
            let other = Owner::Tenant(TenantId::new("other").unwrap());
            prop_assert_eq!(Manifest::verify(&keys(), &other, &bytes).unwrap_err(), ManifestError::Signature);
            let others = Keys::parse(&"77".repeat(32)).unwrap();
            prop_assert!(matches!(Manifest::verify(&others, &recipe.owner, &bytes), Err(ManifestError::Key(_))));
        }

        #[test]
        fn each_field_is_signed((recipe, manifest) in manifest()) {
            let key = keys().current(&recipe.owner);
            let bytes = manifest.sign(&key);
            for field in 0..FIELDS {
                let Some(new) = changed(&manifest, field) else { continue };
                // The body of the one under the signature of the other.
                let mut forged = bytes[..HEAD_BYTES + SIGNATURE_BYTES].to_vec();
                forged.extend(wire::encode(&new));
                let why = Manifest::verify(&keys(), &recipe.owner, &forged).unwrap_err();
                prop_assert_eq!(why, ManifestError::Signature, "field {}", field);
            }
            prop_assert!(changed(&manifest, FIELDS).is_none());
        }

        #[test]
        fn whatever_is_cut_off_or_changed_is_seen((recipe, manifest) in manifest(), at: prop::sample::Index, bit in 0u8..8) {
            let bytes = manifest.sign(&keys().current(&recipe.owner));
            let at = at.index(bytes.len());
            prop_assert!(Manifest::verify(&keys(), &recipe.owner, &bytes[..at]).is_err());
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << bit;
            prop_assert!(Manifest::verify(&keys(), &recipe.owner, &flipped).is_err());
        }

        #[test]
        fn one_note_is_one_recipe(one in recipe::tests::recipe(), other in recipe::tests::recipe()) {
            prop_assert_eq!(one == other, RecipeNote::from(&one) == RecipeNote::from(&other));
        }

        #[test]
        fn a_signed_manifest_of_another_recipe_is_not_taken((recipe, manifest) in manifest(), other in recipe::tests::recipe()) {
            prop_assert_eq!(manifest.is_of(&other).is_ok(), recipe == other);
        }

        #[test]
        fn files_that_make_no_sense_are_refused((recipe, manifest) in manifest()) {
            let key = keys().current(&recipe.owner);
            let refused = |change: &dyn Fn(&mut Manifest)| {
                let mut new = manifest.clone();
                change(&mut new);
                matches!(Manifest::verify(&keys(), &recipe.owner, &new.sign(&key)), Err(ManifestError::Nonsense(_)))
            };
            prop_assert!(refused(&|m| m.memory.chunk_bytes = 4_096));
            prop_assert!(refused(&|m| m.memory.chunk_bytes = u32::MAX));
            let far = ChunkNote { piece: u32::MAX, name: ByteArray::from([1; 32]), stored: 1 };
            prop_assert!(refused(&|m| m.state.chunks.push(far)));
            let first = ChunkNote { piece: 0, name: ByteArray::from([1; 32]), stored: 1 };
            prop_assert!(refused(&|m| m.state.chunks = vec![first, first]));
        }
    }

    #[test]
    fn what_is_another_builds_is_left_where_it_is() {
        assert!(ManifestError::Version(2).is_foreign() && ManifestError::Key(KeyId([0; 8])).is_foreign());
        assert!(!ManifestError::Signature.is_foreign() && !ManifestError::Form(0).is_foreign());
    }
}
