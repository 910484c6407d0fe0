//! Names of images: in registries `[HOST[:PORT]/]REPOSITORY[:TAG][@DIGEST]`, as Docker reads them; by a digest alone; or by where they lay.
//!
//! Owns the grammar and its defaults. Does not own images, or who has which.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Longest name of a repository, in bytes: what registries take.
const REPOSITORY_BYTES_MAX: usize = 255;
/// Longest tag: what the distribution specification allows.
const TAG_BYTES_MAX: usize = 128;
/// Docker's own registry, which is meant where none is named, and the host that serves it.
const DOCKER: &str = "docker.io";
const DOCKER_HOST: &str = "registry-1.docker.io";

/// A SHA-256 of bytes, as 64 lower-case hexadecimal digits. Always safe as a file's name.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

impl Digest {
    /// Reads `sha256:…`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let hex = text.strip_prefix("sha256:")?;
        let good = hex.len() == 64 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        good.then(|| Self(hex.to_owned()))
    }

    /// Of a hash's bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; 32]) -> Self {
        Self(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Its digits.
    #[must_use]
    pub fn hex(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Self::parse(&text).ok_or_else(|| format!("{text:?} is no digest sha256:…"))
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

/// What a task calls its image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Name<'a> {
    /// `sha256:…`.
    Digest(Digest),
    /// `dir:…`, `tar:…` or `oci:…`: where it was imported from.
    Place(&'a str),
    /// As in a registry.
    Registry(Reference),
}

impl<'a> Name<'a> {
    /// Reads a name.
    ///
    /// # Errors
    /// [`ReferenceError`].
    pub fn parse(text: &'a str) -> Result<Self, ReferenceError> {
        match text.split_once(':') {
            Some(("dir" | "tar" | "oci", path)) if !path.is_empty() => Ok(Self::Place(text)),
            Some(("sha256", _)) => Digest::parse(text).map(Self::Digest).ok_or_else(|| wrong(text, NO_DIGEST)),
            _ => Reference::parse(text).map(Self::Registry),
        }
    }
}

/// What stands for a name where many are compared: the same for all ways to write it, by a digest wherever one is in it. None: it is no name.
#[must_use]
pub fn key(text: &str) -> Option<u64> {
    let one = match Name::parse(text).ok()? {
        Name::Digest(digest) | Name::Registry(Reference { wanted: Wanted::Digest(digest), .. }) => digest.to_string(),
        Name::Place(place) => place.to_owned(),
        Name::Registry(Reference { registry, repository, wanted: Wanted::Tag(tag) }) => format!("{registry}/{repository}:{tag}"),
    };
    let hash = blake3::hash(one.as_bytes());
    hash.as_bytes().first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
}

/// Which of a repository's images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// Whatever has this tag now.
    Tag(String),
    /// This one.
    Digest(Digest),
}

/// An image in a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// `HOST` or `HOST:PORT`.
    pub registry: String,
    /// The repository.
    pub repository: String,
    /// Which of its images. A digest beats a tag.
    pub wanted: Wanted,
}

/// A name that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} names no image: {what}; write [HOST[:PORT]/]NAME[:TAG][@sha256:DIGEST]")]
pub struct ReferenceError {
    /// What was written.
    pub text: String,
    /// What is wrong with it.
    pub what: &'static str,
}

impl Reference {
    /// Reads a name.
    ///
    /// # Errors
    /// [`ReferenceError`].
    pub fn parse(text: &str) -> Result<Self, ReferenceError> {
        let wrong = |what| wrong(text, what);
        let (name, digest) = match text.split_once('@') {
            Some((name, digest)) => (name, Some(Digest::parse(digest).ok_or_else(|| wrong(NO_DIGEST))?)),
            None => (text, None),
        };
        let (registry, rest) = match name.split_once('/') {
            Some((host, rest)) if host.contains(['.', ':']) || host == "localhost" => (host, rest),
            _ => (DOCKER, name),
        };
        let (path, tag) = rest.rsplit_once(':').map_or((rest, None), |(path, tag)| (path, Some(tag)));
        let repository = if registry == DOCKER && !path.contains('/') { format!("library/{path}") } else { path.to_owned() };
        if !is_host(registry) {
            return Err(wrong("its registry is no host"));
        }
        if repository.len() > REPOSITORY_BYTES_MAX || !repository.split('/').all(is_repository_part) {
            return Err(wrong("its repository may have lower-case letters, digits, and single . _ - / between them"));
        }
        let wanted = match (digest, tag) {
            (Some(digest), _) => Wanted::Digest(digest),
            (None, Some(tag)) if is_tag(tag) => Wanted::Tag(tag.to_owned()),
            (None, Some(_)) => return Err(wrong("its tag may have letters, digits, . _ -, and 128 at most")),
            (None, None) => Wanted::Tag("latest".to_owned()),
        };
        Ok(Self { registry: registry.to_owned(), repository, wanted })
    }

    /// The host to connect to.
    #[must_use]
    pub fn host(&self) -> &str {
        if self.registry == DOCKER { DOCKER_HOST } else { &self.registry }
    }

    /// Is it on this machine?
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        if let Some(rest) = self.registry.strip_prefix("[::1]") {
            return rest.is_empty() || rest.starts_with(':');
        }
        let host = self.registry.split(':').next().unwrap_or_default();
        host == "localhost" || host.parse::<std::net::Ipv4Addr>().is_ok_and(|address| address.is_loopback())
    }
}

const NO_DIGEST: &str = "its digest is not sha256: and 64 digits in lower case";

fn wrong(text: &str, what: &'static str) -> ReferenceError {
    ReferenceError { text: text.to_owned(), what }
}

fn is_host(text: &str) -> bool {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((host, port)) if host.parse::<std::net::Ipv6Addr>().is_ok() => {
                ("", if port.is_empty() { None } else { port.strip_prefix(':').or(Some("")) })
            }
            _ => return false,
        },
        None => text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
    };
    let name =
        text.starts_with('[') || !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-'));
    name && port.is_none_or(|port| port.parse::<u16>().is_ok())
}

fn is_repository_part(part: &str) -> bool {
    let ends = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    ends(part.bytes().next())
        && ends(part.bytes().next_back())
        && part.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'.' | b'_' | b'-'))
        && !part.contains("..")
}

fn is_tag(tag: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    tag.len() <= TAG_BYTES_MAX && tag.bytes().next().is_some_and(word) && tag.bytes().all(|byte| word(byte) || matches!(byte, b'.' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_docker_reads_them() {
        let tag = |text: &str, registry: &str, repository: &str, tag: &str| {
            let want = Reference { registry: registry.to_owned(), repository: repository.to_owned(), wanted: Wanted::Tag(tag.to_owned()) };
            assert_eq!(Reference::parse(text), Ok(want), "{text}");
        };
        tag("busybox", "docker.io", "library/busybox", "latest");
        tag("me/app:1.0", "docker.io", "me/app", "1.0");
        tag("127.0.0.1:5000/a/b:x", "127.0.0.1:5000", "a/b", "x");
        tag("[::1]:5000/a", "[::1]:5000", "a", "latest");
        tag("localhost/a", "localhost", "a", "latest");
        let digest = format!("sha256:{}", "0".repeat(64));
        let pinned = Reference::parse(&format!("ghcr.io/a/b:x@{digest}")).unwrap();
        assert_eq!(pinned.wanted, Wanted::Digest(Digest::parse(&digest).unwrap()));
    }

    #[test]
    fn images_are_also_called_by_digests_and_places() {
        let digest = format!("sha256:{}", "0a".repeat(32));
        assert_eq!(Name::parse(&digest), Ok(Name::Digest(Digest::from_bytes(&[10; 32]))));
        assert_eq!(Name::parse("dir:/srv/A b"), Ok(Name::Place("dir:/srv/A b")));
        assert!(matches!(Name::parse("busybox:1.36"), Ok(Name::Registry(_))));
        for wrong in ["sha256:1", "dir:", "Not A Name", ""] {
            assert!(Name::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_key_is_the_same_for_all_ways_to_write_a_name() {
        let digest = format!("sha256:{}", "0a".repeat(32));
        for (one, other) in [
            ("busybox", "docker.io/library/busybox:latest"),
            (digest.as_str(), &format!("ghcr.io/a/b:x@{digest}")),
            ("dir:/srv/x", "dir:/srv/x"),
        ] {
            assert!(key(one).is_some() && key(one) == key(other), "{one}");
        }
        let others = ["busybox:1", "me/busybox", "dir:/srv/y", "tar:/srv/x"];
        assert!(others.iter().all(|other| key(other).is_some() && key(other) != key("busybox")));
        assert_eq!(key("Not A Name"), None);
    }

    #[test]
    fn what_is_no_name() {
        for wrong in [
            "",
            "A",
            "a/../b",
            "host.x/",
            "host.x/a?b=c",
            "host.x:99999/a",
            "user:pw@host.x/a",
            "a b",
            "a:",
            "a:..",
            "a@sha256:1",
            "-x.y:1/-",
        ] {
            assert!(Reference::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn this_machine() {
        for (text, here) in [
            ("localhost:5000/a", true),
            ("127.1.2.3/a", true),
            ("[::1]/a", true),
            ("localhost.example/a", false),
            ("127.0.0.1.example/a", false),
            ("10.0.0.1:5000/a", false),
        ] {
            assert_eq!(Reference::parse(text).unwrap().is_loopback(), here, "{text}");
        }
    }
}
