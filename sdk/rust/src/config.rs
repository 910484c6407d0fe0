//! Where a client finds its cluster.
//!
//! Owns the settings, the environment variables, and the file that `volley up` writes. Does not own connections (`client`).
//!
//! Read in this order: `VOLLEY_URL` and `VOLLEY_TOKEN`; then the file named by `VOLLEY_CONFIG`, else
//! `$XDG_CONFIG_HOME/volley/cluster.json`, else `~/.config/volley/cluster.json`. The file's token is never sent to another address
//! than the file's own.

use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// How long and how fast to try again what failed but may succeed later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retry {
    /// Longest time spent waiting between tries before the cluster has answered at all: with a wrong address, waiting is of no use.
    pub first_contact: Duration,
    /// Longest time spent waiting between tries of one request afterwards. Streams count it anew after each row.
    pub budget: Duration,
    /// The first wait.
    pub backoff_first: Duration,
    /// The longest wait.
    pub backoff_max: Duration,
    /// Longest silence within an answer before its connection is given up: coordinators send something every 15 s.
    pub silence_max: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            first_contact: Duration::from_secs(3),
            // A new leader takes over within 10 s, a coordinator restarts within a minute.
            budget: Duration::from_secs(120),
            backoff_first: Duration::from_millis(100),
            backoff_max: Duration::from_secs(5),
            silence_max: Duration::from_secs(60),
        }
    }
}

/// Called before each wait: the error and how long the wait is. For telling people why nothing moves.
pub type OnRetry = Arc<dyn Fn(&Error, Duration) + Send + Sync>;

/// What a client is told.
#[derive(Clone)]
pub struct Config {
    /// Coordinators, such as `http://127.0.0.1:7800`; at least one. The next is tried when one doesn't answer.
    pub endpoints: Vec<String>,
    /// The bearer token.
    pub token: Option<String>,
    /// Acts for this tenant; only an operator may name another than its own.
    pub tenant: Option<String>,
    /// Trying again.
    pub retry: Retry,
    /// Told of every wait.
    pub on_retry: Option<OnRetry>,
}

// Written by hand so that no log line can ever show the token.
impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("endpoints", &self.endpoints)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .field("tenant", &self.tenant)
            .field("retry", &self.retry)
            .finish_non_exhaustive()
    }
}

/// What was said by flags or environment variables; what is left out comes from the cluster file.
#[derive(Debug, Clone, Default)]
pub struct Given {
    /// Addresses, separated by commas.
    pub url: Option<String>,
    /// The token.
    pub token: Option<String>,
    /// The cluster file.
    pub file: Option<PathBuf>,
}

impl Given {
    /// What the environment says. Empty variables count as not set.
    #[must_use]
    pub fn from_env() -> Self {
        let var = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        Self { url: var("VOLLEY_URL"), token: var("VOLLEY_TOKEN"), file: var("VOLLEY_CONFIG").map(PathBuf::from) }
    }
}

impl Config {
    /// A client of these coordinators.
    #[must_use]
    pub fn new(endpoints: Vec<String>, token: Option<String>) -> Self {
        Self { endpoints, token, tenant: None, retry: Retry::default(), on_retry: None }
    }

    /// What the environment and the cluster file say.
    ///
    /// # Errors
    /// [`Error::NoCluster`] when neither names one; [`Error::File`] and [`Error::Setting`] when the file can't be used.
    pub fn from_env() -> Result<Self, Error> {
        Self::resolve(Given::from_env())
    }

    /// Completes what was given from the cluster file.
    ///
    /// # Errors
    /// As [`Config::from_env`].
    pub fn resolve(given: Given) -> Result<Self, Error> {
        if let (Some(url), Some(_)) = (&given.url, &given.token) {
            return Ok(Self::new(split(url), given.token));
        }
        let named = given.file.is_some();
        let path = given.file.or_else(ClusterFile::default_path).unwrap_or_else(|| PathBuf::from("cluster.json"));
        let file = match ClusterFile::load(&path) {
            Ok(file) => Some(file),
            Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::NotFound && !named => None,
            Err(error) => return Err(error),
        };
        match (given.url, file) {
            (None, None) => Err(Error::NoCluster { looked: path }),
            (None, Some(file)) => Ok(Self::new(split(&file.url), given.token.or(Some(file.token)))),
            (Some(url), file) => {
                let endpoints = split(&url);
                // A token is a secret of one cluster: another address must not get to see it.
                let own = file.filter(|file| split(&file.url) == endpoints).map(|file| file.token);
                Ok(Self::new(endpoints, given.token.or(own)))
            }
        }
    }
}

fn split(urls: &str) -> Vec<String> {
    urls.split(',').map(|url| url.trim().trim_end_matches('/').to_owned()).filter(|url| !url.is_empty()).collect()
}

/// The file that says where the cluster is. Readable for its owner only.
#[derive(Clone, Serialize, Deserialize)]
pub struct ClusterFile {
    /// Addresses of coordinators, separated by commas.
    pub url: String,
    /// The bearer token.
    pub token: String,
}

impl fmt::Debug for ClusterFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterFile").field("url", &self.url).finish_non_exhaustive()
    }
}

impl ClusterFile {
    /// Where the file lies when nobody says otherwise; none without a home directory.
    #[must_use]
    pub fn default_path() -> Option<PathBuf> {
        let dir = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let config = dir("XDG_CONFIG_HOME").or_else(|| dir("HOME").map(|home| home.join(".config")))?;
        Some(config.join("volley").join("cluster.json"))
    }

    /// Reads the file.
    ///
    /// # Errors
    /// [`Error::File`] when it can't be read, [`Error::Setting`] when it isn't what it should be.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let file = |source| Error::File { path: path.to_owned(), doing: "read the cluster file", source };
        let bytes = std::fs::read(path).map_err(file)?;
        serde_json::from_slice(&bytes).map_err(|error| Error::Setting {
            setting: format!("the cluster file {}", path.display()),
            why: format!("{error}; it should read {{\"url\": \"http://…\", \"token\": \"vt_…\"}}"),
        })
    }

    /// Writes the file with mode 0600, whole or not at all; its directory is made with mode 0700.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        let file = |doing| move |source| Error::File { path: path.to_owned(), doing, source };
        if let Some(dir) = path.parent() {
            make_dir(dir).map_err(file("make the directory of"))?;
        }
        let text = serde_json::to_vec_pretty(self).map_err(|error| file("write")(io::Error::other(error)))?;
        let part = path.with_extension(format!("{}.part", std::process::id()));
        let written = write_private(&part, &text).and_then(|()| std::fs::rename(&part, path));
        if written.is_err() {
            // Only our own half-written file; that it may stay behind is no second error.
            let _ = std::fs::remove_file(&part);
        }
        written.map_err(file("write"))
    }
}

fn make_dir(dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.write_all(b"\n")?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn saved(dir: &Path) -> PathBuf {
        let path = dir.join("volley").join("cluster.json");
        let file = ClusterFile { url: "http://a:1".into(), token: "vt_a_secret".into() };
        file.save(&path).unwrap_or_else(|e| panic!("{e}"));
        path
    }

    fn resolve(url: Option<&str>, token: Option<&str>, file: &Path) -> Result<Config, Error> {
        Config::resolve(Given { url: url.map(Into::into), token: token.map(Into::into), file: Some(file.into()) })
    }

    #[test]
    fn the_file_is_its_owners_alone_and_is_replaced_whole() {
        let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let path = saved(dir.path());
        let mode = std::fs::metadata(&path).map(|m| m.permissions().mode() & 0o777).ok();
        assert_eq!(mode, Some(0o600));
        saved(dir.path());
        assert_eq!(std::fs::read_dir(path.parent().unwrap_or(dir.path())).map(Iterator::count).ok(), Some(1));
    }

    #[test]
    fn the_files_token_goes_to_the_files_address_only() {
        let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let path = saved(dir.path());
        let token = |url, token| resolve(url, token, &path).ok().and_then(|config| config.token);
        assert_eq!(token(None, None).as_deref(), Some("vt_a_secret"));
        assert_eq!(token(Some("http://a:1/"), None).as_deref(), Some("vt_a_secret"));
        assert_eq!(token(Some("http://b:1"), None), None);
        assert_eq!(token(Some("http://b:1"), Some("t")).as_deref(), Some("t"));
    }

    #[test]
    fn several_addresses_are_separated_by_commas() {
        assert_eq!(split("http://a:1/, http://b:2,"), ["http://a:1", "http://b:2"]);
    }

    #[test]
    fn a_file_that_is_named_must_be_there_and_be_one() {
        let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let missing = resolve(None, None, &dir.path().join("none"));
        assert!(matches!(missing, Err(Error::File { .. })), "{missing:?}");
        let path = dir.path().join("bad");
        std::fs::write(&path, "{}").unwrap_or_else(|e| panic!("{e}"));
        assert!(matches!(resolve(None, None, &path), Err(Error::Setting { .. })));
    }

    #[test]
    fn no_debug_text_shows_a_token() {
        let config = Config::new(vec![], Some("vt_a_secret".into()));
        let file = ClusterFile { url: String::new(), token: "vt_a_secret".into() };
        assert!(!format!("{config:?} {file:?}").contains("secret"));
    }
}
