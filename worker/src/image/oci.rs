//! What an image says of itself: digests, manifests, configuration.
//!
//! Owns reading those documents, and which of several images is taken. Does not own fetching them (`layout`,
//! `registry`).

use std::fmt;

use oci_spec::image::{Arch, Descriptor, ImageIndex, ImageManifest, MediaType, Os};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

pub use volley_jobspecs::image::Digest;

/// Largest index, manifest or configuration, in bytes: what the distribution specification asks registries to take.
pub const DOCUMENT_BYTES_MAX: u64 = 4 << 20;
/// Most layers of an image. Overlay file systems elsewhere end at about as many.
pub const LAYERS_MAX: usize = 128;
/// Kinds of documents that name an image, to ask a registry for.
pub const ACCEPT: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
     application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json";
/// How an index names the images in it.
pub const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// The digest of what was hashed.
#[must_use]
pub fn digest_of(hash: Sha256) -> Digest {
    Digest::from_bytes(&hash.finalize().into())
}

/// The digest of bytes.
#[must_use]
pub fn digest_of_bytes(bytes: &[u8]) -> Digest {
    Digest::from_bytes(&Sha256::digest(bytes).into())
}

/// A blob that an image names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Named {
    /// Its digest.
    pub digest: Digest,
    /// Its size in bytes.
    pub bytes: u64,
}

/// What a program of the image starts with, unless its task says otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// `NAME=VALUE` each.
    pub env: Vec<String>,
    /// Where it starts; empty for the root.
    pub working_dir: String,
    /// `USER[:GROUP]`, names or numbers; empty for root.
    pub user: String,
    /// The program, and arguments before `cmd`.
    pub entrypoint: Vec<String>,
    /// Its arguments, or a command if there is no entrypoint.
    pub cmd: Vec<String>,
}

/// An image's manifest, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Where its configuration is.
    pub config: Named,
    /// Its layers, the lowest first.
    pub layers: Vec<Named>,
}

/// What a document that names an image turned out to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Document {
    /// Several images; this is the one for this machine.
    Index(Named),
    /// One image.
    Manifest(Manifest),
}

/// A document that can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DocumentError {
    /// It is too large.
    #[error("a document of the image has {bytes} bytes; {DOCUMENT_BYTES_MAX} are the most")]
    Large {
        /// Its size.
        bytes: u64,
    },
    /// It is not what it should be.
    #[error("a document of the image can't be read: {0}")]
    Bad(String),
    /// A digest of another kind than SHA-256.
    #[error("the image names a blob by {0:?}; only sha256:… is known here")]
    Digest(String),
    /// No image for this kind of machine.
    #[error("no image for linux/amd64 is in it; it has: {has}")]
    Platform {
        /// What there is.
        has: String,
    },
    /// No image of this name.
    #[error("no image named {wanted:?} is in it; it has: {has}")]
    Name {
        /// What was asked for.
        wanted: String,
        /// What there is.
        has: String,
    },
    /// Several images, and none was named.
    #[error("several images are in it; name one of: {has}")]
    Several {
        /// What there is.
        has: String,
    },
    /// Too many layers.
    #[error("the image has {layers} layers; {LAYERS_MAX} are the most")]
    Layers {
        /// How many.
        layers: usize,
    },
    /// A layer that is no file system's.
    #[error("the image has a layer of the kind {0:?}, which is no file system's")]
    Kind(String),
    /// As many layers as their digests are expected.
    #[error("the image has {layers} layers, but its configuration speaks of {diffs}")]
    Diffs {
        /// Layers of the manifest.
        layers: usize,
        /// Layers of the configuration.
        diffs: usize,
    },
}

fn bad(why: &dyn fmt::Display) -> DocumentError {
    DocumentError::Bad(why.to_string())
}

fn named(descriptor: &Descriptor) -> Result<Named, DocumentError> {
    let text = descriptor.digest().to_string();
    let digest = Digest::parse(&text).ok_or(DocumentError::Digest(text))?;
    Ok(Named { digest, bytes: descriptor.size() })
}

/// The names of what is in an index, for people.
fn listed<'a, T: fmt::Display + 'a>(names: impl Iterator<Item = T>) -> String {
    const NAMES: usize = 20;
    let names: Vec<String> = names.take(NAMES).map(|name| name.to_string()).collect();
    if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
}

fn for_us(descriptor: &Descriptor) -> bool {
    let platform = descriptor.platform().as_ref();
    platform.is_none_or(|platform| *platform.architecture() == Arch::Amd64 && *platform.os() == Os::Linux)
}

/// Reads an index or a manifest.
///
/// # Errors
/// [`DocumentError`].
pub fn document(bytes: &[u8]) -> Result<Document, DocumentError> {
    /// What tells them apart, whatever their media types say.
    #[derive(Deserialize)]
    struct Shape {
        manifests: Option<serde::de::IgnoredAny>,
    }
    let shape: Shape = serde_json::from_slice(bytes).map_err(|e| bad(&e))?;
    if shape.manifests.is_none() {
        return manifest(bytes).map(Document::Manifest);
    }
    let index: ImageIndex = serde_json::from_slice(bytes).map_err(|e| bad(&e))?;
    let ours = index.manifests().iter().find(|entry| for_us(entry));
    let platforms =
        || index.manifests().iter().filter_map(|entry| entry.platform().as_ref()).map(|p| format!("{}/{}", p.os(), p.architecture()));
    named(ours.ok_or_else(|| DocumentError::Platform { has: listed(platforms()) })?).map(Document::Index)
}

/// Which image of a layout's `index.json` is meant: the one named `wanted`, or the only one.
///
/// # Errors
/// [`DocumentError`].
pub fn pick(index: &[u8], wanted: Option<&str>) -> Result<Named, DocumentError> {
    let index: ImageIndex = serde_json::from_slice(index).map_err(|e| bad(&e))?;
    let name = |entry: &Descriptor| entry.annotations().as_ref().and_then(|notes| notes.get(REF_NAME)).cloned();
    let has = || listed(index.manifests().iter().map(|entry| name(entry).unwrap_or_else(|| entry.digest().to_string())));
    let found = match wanted {
        Some(wanted) => {
            let same = |entry: &&Descriptor| name(entry).as_deref() == Some(wanted) || entry.digest().to_string() == wanted;
            index.manifests().iter().find(same).ok_or_else(|| DocumentError::Name { wanted: wanted.to_owned(), has: has() })?
        }
        None => {
            let ours: Vec<&Descriptor> = index.manifests().iter().filter(|entry| for_us(entry)).collect();
            match ours[..] {
                [one] => one,
                [] => return Err(DocumentError::Platform { has: has() }),
                _ => return Err(DocumentError::Several { has: has() }),
            }
        }
    };
    named(found)
}

fn manifest(bytes: &[u8]) -> Result<Manifest, DocumentError> {
    let manifest: ImageManifest = serde_json::from_slice(bytes).map_err(|e| bad(&e))?;
    if manifest.layers().len() > LAYERS_MAX {
        return Err(DocumentError::Layers { layers: manifest.layers().len() });
    }
    for layer in manifest.layers() {
        let known = match layer.media_type() {
            MediaType::ImageLayer | MediaType::ImageLayerGzip | MediaType::ImageLayerZstd => true,
            other => other.to_string().contains("rootfs.diff.tar") || other.to_string().contains("layer.nondistributable.v1.tar"),
        };
        if !known {
            return Err(DocumentError::Kind(layer.media_type().to_string()));
        }
    }
    let layers = manifest.layers().iter().map(named).collect::<Result<_, _>>()?;
    Ok(Manifest { config: named(manifest.config())?, layers })
}

/// Reads an image's configuration: what its programs start with, and the digests of its `layers` layers, unpacked.
///
/// # Errors
/// [`DocumentError`].
pub fn config(bytes: &[u8], layers: usize) -> Result<(Config, Vec<Digest>), DocumentError> {
    // Of our own: tools write `null` for what is empty, in more places than the types of oci-spec take it.
    #[derive(Deserialize, Default)]
    #[serde(rename_all = "PascalCase")]
    struct Run {
        env: Option<Vec<String>>,
        working_dir: Option<String>,
        user: Option<String>,
        entrypoint: Option<Vec<String>>,
        cmd: Option<Vec<String>>,
    }
    #[derive(Deserialize)]
    struct RootFs {
        diff_ids: Option<Vec<String>>,
    }
    #[derive(Deserialize)]
    struct Whole {
        architecture: Option<String>,
        os: Option<String>,
        config: Option<Run>,
        rootfs: RootFs,
    }
    let whole: Whole = serde_json::from_slice(bytes).map_err(|e| bad(&e))?;
    if whole.os.as_deref() != Some("linux") || whole.architecture.as_deref() != Some("amd64") {
        let unsaid = || "unsaid".to_owned();
        return Err(DocumentError::Platform {
            has: format!("{}/{}", whole.os.unwrap_or_else(unsaid), whole.architecture.unwrap_or_else(unsaid)),
        });
    }
    let diffs = whole.rootfs.diff_ids.unwrap_or_default();
    if diffs.len() != layers {
        return Err(DocumentError::Diffs { layers, diffs: diffs.len() });
    }
    let diffs = diffs.into_iter().map(|text| Digest::parse(&text).ok_or(DocumentError::Digest(text))).collect::<Result<_, _>>()?;
    let run = whole.config.unwrap_or_default();
    let config = Config {
        env: run.env.unwrap_or_default(),
        working_dir: run.working_dir.unwrap_or_default(),
        user: run.user.unwrap_or_default(),
        entrypoint: run.entrypoint.unwrap_or_default(),
        cmd: run.cmd.unwrap_or_default(),
    };
    Ok((config, diffs))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(digit: char) -> String {
        format!("sha256:{}", digit.to_string().repeat(64))
    }

    fn entry(digit: char, platform: &str, name: &str) -> String {
        let (os, arch) = platform.split_once('/').unwrap();
        format!(
            r#"{{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"{}","size":5,"platform":{{"os":"{os}","architecture":"{arch}"}},"annotations":{{"{REF_NAME}":"{name}"}}}}"#,
            hex(digit)
        )
    }

    fn index(entries: &[String]) -> Vec<u8> {
        format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, entries.join(",")).into_bytes()
    }

    #[test]
    fn digests_are_safe_names() {
        assert!(Digest::parse(&hex('a')).is_some());
        for wrong in ["", "sha256:", "sha512:00", "sha256:../../../../etc/passwd", &hex('A'), &hex('g'), &hex('a')[..70]] {
            assert!(Digest::parse(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn one_of_several() {
        let both = index(&[entry('1', "linux/arm64", "a"), entry('2', "linux/amd64", "b"), entry('3', "windows/amd64", "c")]);
        let second = Named { digest: Digest::parse(&hex('2')).unwrap(), bytes: 5 };
        assert_eq!(document(&both), Ok(Document::Index(second.clone())));
        assert_eq!(pick(&both, None), Ok(second.clone()));
        assert_eq!(pick(&both, Some("b")), Ok(second));
        let why = pick(&both, Some("x")).unwrap_err().to_string();
        assert!(why.contains("\"x\"") && why.contains("a, b, c"), "{why}");
        let none = index(&[entry('1', "linux/arm64", "a")]);
        assert_eq!(document(&none), Err(DocumentError::Platform { has: "linux/arm64".to_owned() }));
        let twice = index(&[entry('1', "linux/amd64", "a"), entry('2', "linux/amd64", "b")]);
        assert_eq!(pick(&twice, None), Err(DocumentError::Several { has: "a, b".to_owned() }));
    }

    #[test]
    fn manifests() {
        let layer = |kind: &str| format!(r#"{{"mediaType":"{kind}","digest":"{}","size":7}}"#, hex('b'));
        let manifest = |layers: &[String]| {
            let config = format!(r#"{{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"{}","size":3}}"#, hex('a'));
            format!(r#"{{"schemaVersion":2,"config":{config},"layers":[{}]}}"#, layers.join(",")).into_bytes()
        };
        let good = ["application/vnd.oci.image.layer.v1.tar+gzip", "application/vnd.docker.image.rootfs.diff.tar.gzip"].map(layer);
        let Ok(Document::Manifest(read)) = document(&manifest(&good)) else { panic!("not read") };
        assert_eq!((read.config.bytes, read.layers.len()), (3, 2));
        assert!(matches!(document(&manifest(&[layer("application/vnd.in-toto+json")])), Err(DocumentError::Kind(_))));
        let many = vec![layer("application/vnd.oci.image.layer.v1.tar"); LAYERS_MAX + 1];
        assert_eq!(document(&manifest(&many)), Err(DocumentError::Layers { layers: LAYERS_MAX + 1 }));
        assert!(matches!(document(b"[]"), Err(DocumentError::Bad(_))));
    }

    #[test]
    fn configurations() {
        let text = format!(
            r#"{{"os":"linux","architecture":"amd64","config":{{"Env":["A=b"],"Cmd":null,"Volumes":null}},"rootfs":{{"type":"layers","diff_ids":["{}"]}}}}"#,
            hex('c')
        );
        let (read, diffs) = config(text.as_bytes(), 1).unwrap();
        assert_eq!((read.env, read.cmd, diffs.len()), (vec!["A=b".to_owned()], vec![], 1));
        assert_eq!(config(text.as_bytes(), 2), Err(DocumentError::Diffs { layers: 2, diffs: 1 }));
        let arm = text.replace("amd64", "arm64");
        assert_eq!(config(arm.as_bytes(), 1), Err(DocumentError::Platform { has: "linux/arm64".to_owned() }));
    }
}
