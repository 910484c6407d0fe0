//! Images made by the tests.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

/// How layers are packed.
#[derive(Clone, Copy, Debug)]
pub enum Packing {
    Gzip,
    Zstd,
    Plain,
}

/// An image's files, and its layers as archives.
pub struct Made {
    dir: tempfile::TempDir,
    pub layers: Vec<Vec<u8>>,
}

pub fn sha256(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

/// An archive with these entries; a name that ends with `/` is a directory.
pub fn tar(entries: &[(&str, &str)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, text) in entries {
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(if name.ends_with('/') { tar::EntryType::Directory } else { tar::EntryType::Regular });
        header.set_mode(if name.ends_with('/') { 0o755 } else { 0o644 });
        header.set_size(text.len() as u64);
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_cksum();
        builder.append(&header, text.as_bytes()).unwrap();
    }
    builder.into_inner().unwrap()
}

impl Made {
    /// A small root with busybox, links of both kinds, odd names and modes.
    pub fn busybox() -> Option<Self> {
        let (busybox, tar) = (super::program("busybox")?, super::program("tar")?);
        let made = Self { dir: tempfile::tempdir().unwrap(), layers: Vec::new() };
        let root = made.root();
        for dir in ["bin", "etc", "tmp", "var/empty"] {
            std::fs::create_dir_all(root.join(dir)).unwrap();
        }
        std::fs::copy(busybox, root.join("bin/busybox")).unwrap();
        std::fs::hard_link(root.join("bin/busybox"), root.join("bin/ls")).unwrap();
        std::os::unix::fs::symlink("busybox", root.join("bin/sh")).unwrap();
        std::os::unix::fs::symlink("../../../etc//./passwd", root.join("tmp/up")).unwrap();
        std::fs::write(root.join("etc/passwd"), "root:x:0:0::/:/bin/sh\n").unwrap();
        std::fs::write(root.join("etc").join("n".repeat(200)), "a long name").unwrap();
        std::fs::write(root.join("etc/new\nline ü"), "").unwrap();
        for (name, mode) in [("", 0o755), ("bin/busybox", 0o4755), ("tmp", 0o1777), ("etc/passwd", 0o640)] {
            std::fs::set_permissions(root.join(name), PermissionsExt::from_mode(mode)).unwrap();
        }
        let output = Command::new(tar).args(["--format=gnu", "--numeric-owner", "-C"]).arg(&root).args(["-cf", "-", "."]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        Some(Self { layers: vec![output.stdout], ..made })
    }

    /// An image of these layers.
    pub fn layers(layers: &[&[(&str, &str)]]) -> Self {
        Self::of(layers.iter().map(|entries| tar(entries)).collect())
    }

    /// An image of these archives.
    pub fn of(layers: Vec<Vec<u8>>) -> Self {
        Self { dir: tempfile::tempdir().unwrap(), layers }
    }

    /// Where its files lie.
    pub fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    /// Its first layer as a file.
    pub fn tarball(&self) -> PathBuf {
        let path = self.dir.path().join("root.tar");
        std::fs::write(&path, &self.layers[0]).unwrap();
        path
    }

    /// An OCI layout with it, and with an image for other machines.
    pub fn layout(&self, packing: Packing) -> PathBuf {
        let dir = self.dir.path().join(format!("layout-{packing:?}"));
        std::fs::create_dir_all(dir.join("blobs/sha256")).unwrap();
        for (name, bytes) in self.blobs(packing) {
            std::fs::write(dir.join("blobs/sha256").join(name.strip_prefix("sha256:").unwrap()), bytes).unwrap();
        }
        let manifest = self.manifest(packing);
        std::fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        let other = format!(
            r#"{{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"{}","size":9,"platform":{{"os":"linux","architecture":"s390x"}}}}"#,
            sha256(b"other")
        );
        let ours = format!(
            r#"{{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"{}","size":{}}}"#,
            sha256(&manifest),
            manifest.len()
        );
        std::fs::write(dir.join("index.json"), format!(r#"{{"schemaVersion":2,"manifests":[{other},{ours}]}}"#)).unwrap();
        dir
    }

    /// The same as one archive.
    pub fn archive(&self, layout: &Path) -> PathBuf {
        let path = self.dir.path().join("layout.tar");
        let mut builder = tar::Builder::new(File::create(&path).unwrap());
        builder.append_dir_all(".", layout).unwrap();
        builder.into_inner().unwrap().sync_all().unwrap();
        path
    }

    /// Its configuration.
    pub fn config(&self) -> Vec<u8> {
        let diffs: Vec<String> = self.layers.iter().map(|layer| format!("\"{}\"", sha256(layer))).collect();
        let run = r#"{"Env":["A=b c"],"User":"7:8","WorkingDir":"/etc","Entrypoint":["/bin/busybox"],"Cmd":["sh"],"Volumes":null}"#;
        let diffs = diffs.join(",");
        format!(r#"{{"os":"linux","architecture":"amd64","config":{run},"rootfs":{{"type":"layers","diff_ids":[{diffs}]}}}}"#).into_bytes()
    }

    /// Its layers, packed.
    pub fn packed(&self, packing: Packing) -> Vec<Vec<u8>> {
        let pack = |layer: &Vec<u8>| match packing {
            Packing::Gzip => {
                let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                encoder.write_all(layer).unwrap();
                encoder.finish().unwrap()
            }
            Packing::Zstd => zstd::stream::encode_all(&layer[..], 1).unwrap(),
            Packing::Plain => layer.clone(),
        };
        self.layers.iter().map(pack).collect()
    }

    /// Its manifest.
    pub fn manifest(&self, packing: Packing) -> Vec<u8> {
        let kind = match packing {
            Packing::Gzip => "+gzip",
            Packing::Zstd => "+zstd",
            Packing::Plain => "",
        };
        let layer = |bytes: Vec<u8>| {
            let (digest, size) = (sha256(&bytes), bytes.len());
            format!(r#"{{"mediaType":"application/vnd.oci.image.layer.v1.tar{kind}","digest":"{digest}","size":{size}}}"#)
        };
        let layers: Vec<String> = self.packed(packing).into_iter().map(layer).collect();
        let (layers, config) = (layers.join(","), self.config());
        let (digest, size) = (sha256(&config), config.len());
        let config = format!(r#"{{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"{digest}","size":{size}}}"#);
        let kind = "application/vnd.oci.image.manifest.v1+json";
        format!(r#"{{"schemaVersion":2,"mediaType":"{kind}","config":{config},"layers":[{layers}]}}"#).into_bytes()
    }

    /// All of its blobs by their digests, manifest included.
    pub fn blobs(&self, packing: Packing) -> Vec<(String, Vec<u8>)> {
        let all = self.packed(packing).into_iter().chain([self.config(), self.manifest(packing)]);
        all.map(|bytes| (sha256(&bytes), bytes)).collect()
    }
}
