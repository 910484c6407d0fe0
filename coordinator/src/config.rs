//! What a coordinator is told.
//!
//! Owns the values, their defaults and the checks that need nothing but them. Does not read flags or files: the composition root does.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use volley_jobspecs::ids::{IdError, check_name};
use volley_jobspecs::observe::Observing;
use volley_jobspecs::validate::Features;
use volley_store::StoreConfig;
use volley_volume::format::seal::ClusterKeys;

use crate::api::auth::{BOOTSTRAP_ID, TOKEN_PREFIX};
use crate::api::listen::Limits;
use crate::api::streams::KEEP_ALIVE;
use crate::api::uploads::UPLOAD_BYTES_MAX;
use crate::checkpoint::Every;
use crate::garbage::Collect;
use crate::io::bus::NatsConfig;
use crate::leader::Tuning;

/// How long NATS may be away when a coordinator starts, by default: a server that starts beside it is up within seconds.
pub const START_PATIENCE: Duration = Duration::from_secs(60);
/// Fewest characters of a bootstrap secret: below this it can be guessed.
pub const SECRET_CHARS_MIN: usize = 16;

/// A coordinator's configuration.
#[derive(Clone)]
pub struct CoordinatorConfig {
    /// Its name, for people and logs; each start adds something of its own to it.
    pub name: String,
    /// How to reach NATS.
    pub nats: NatsConfig,
    /// Copies of the log and the lease in a NATS cluster: 1, 3 or 5. `None`: as they are; 1 of a new log.
    pub replicas: Option<usize>,
    /// Most bytes of the log. `None`: as it is; of a new log 4 GiB, or what the server has room for.
    pub log_bytes_max: Option<u64>,
    /// Directory of its RocksDB; made if missing. It can be deleted: it is rebuilt from the log.
    pub data_dir: PathBuf,
    /// The bucket.
    pub store: StoreConfig,
    /// Make the bucket when it isn't there?
    pub create_bucket: bool,
    /// Where the API listens; port 0 picks a free one.
    pub listen: SocketAddr,
    /// The operator's first token, `vt_bootstrap_<secret>`; `None`: there is none, and tokens made before are all there are.
    pub bootstrap_token: Option<String>,
    /// What specs may use beside the tiers that workers offer.
    pub features: Features,
    /// Other buckets that items may be read from with the coordinator's own credentials; `*` is any. Deny by default.
    pub items_buckets: Vec<String>,
    /// Largest upload, in bytes.
    pub upload_bytes_max: u64,
    /// May whoever is on this host read the metrics without a token? Tasks on it can, too. Deny by default.
    pub local_metrics: bool,
    /// What the API's listener allows.
    pub limits: Limits,
    /// After this much silence a stream of the API says that it lives.
    pub keep_alive: Duration,
    /// How long NATS may be away at the start.
    pub start_patience: Duration,
    /// When checkpoints are made.
    pub checkpoints: Every,
    /// When garbage is collected.
    pub collect: Collect,
    /// Tuning that tests shorten.
    pub tuning: Tuning,
    /// Who is told of spans and figures.
    pub observer: Observing,
    /// The keys that volumes' keys are wrapped with. None: there are no volumes.
    pub volume_keys: Option<ClusterKeys>,
}

// Written by hand so that no log line can ever show a secret.
impl fmt::Debug for CoordinatorConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CoordinatorConfig")
            .field("name", &self.name)
            .field("nats", &self.nats.url)
            .field("data_dir", &self.data_dir)
            .field("store", &self.store)
            .field("listen", &self.listen)
            .finish_non_exhaustive()
    }
}

/// Why a configuration is of no use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The name is none.
    #[error("the coordinator's name: {0}")]
    Name(#[from] IdError),
    /// NATS can't keep so many copies.
    #[error("the log can't have {0} copies; allowed: 1, 3, 5")]
    Replicas(usize),
    /// The bootstrap token has another form.
    #[error(
        "the bootstrap token must be vt_bootstrap_ and a secret of at least {SECRET_CHARS_MIN} letters and digits (`openssl rand -hex 32` makes one)"
    )]
    Bootstrap,
}

impl CoordinatorConfig {
    /// A single coordinator with the defaults: a free port on this host, no bootstrap token.
    #[must_use]
    pub fn new(nats: NatsConfig, data_dir: PathBuf, store: StoreConfig) -> Self {
        Self {
            name: "coordinator".to_owned(),
            nats,
            replicas: None,
            log_bytes_max: None,
            data_dir,
            store,
            create_bucket: false,
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            bootstrap_token: None,
            features: Features::current(),
            items_buckets: Vec::new(),
            upload_bytes_max: UPLOAD_BYTES_MAX,
            local_metrics: false,
            limits: Limits::default(),
            keep_alive: KEEP_ALIVE,
            start_patience: START_PATIENCE,
            checkpoints: Every::default(),
            collect: Collect::default(),
            tuning: Tuning::default(),
            observer: None,
            volume_keys: None,
        }
    }

    /// Checks what can be checked without the network; returns the secret of the bootstrap token.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn check(&self) -> Result<Option<&str>, ConfigError> {
        check_name(&self.name)?;
        if let Some(replicas) = self.replicas.filter(|replicas| ![1, 3, 5].contains(replicas)) {
            return Err(ConfigError::Replicas(replicas));
        }
        let Some(token) = &self.bootstrap_token else { return Ok(None) };
        let secret =
            token.strip_prefix(TOKEN_PREFIX).and_then(|rest| rest.strip_prefix(BOOTSTRAP_ID)).and_then(|rest| rest.strip_prefix('_'));
        let fits =
            |secret: &&str| secret.len() >= SECRET_CHARS_MIN && secret.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
        secret.filter(fits).map(Some).ok_or(ConfigError::Bootstrap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> CoordinatorConfig {
        CoordinatorConfig::new(NatsConfig::default(), PathBuf::new(), StoreConfig::new("http://localhost:1", "bucket", "key", "hidden"))
    }

    #[test]
    fn a_wrong_configuration_is_named() {
        assert_eq!(config().check(), Ok(None));
        assert!(matches!(CoordinatorConfig { name: "a.b".into(), ..config() }.check(), Err(ConfigError::Name(_))));
        assert_eq!(CoordinatorConfig { replicas: Some(2), ..config() }.check(), Err(ConfigError::Replicas(2)));
        let with = |token: &str| CoordinatorConfig { bootstrap_token: Some(token.into()), ..config() };
        assert_eq!(with("vt_bootstrap_0123456789abcdef").check(), Ok(Some("0123456789abcdef")));
        for bad in ["", "vt_bootstrap_short", "0123456789abcdef0123", "vt_other_0123456789abcdef", "vt_bootstrap_0123456789 abcdef"] {
            assert_eq!(with(bad).check(), Err(ConfigError::Bootstrap), "{bad}");
        }
    }

    #[test]
    fn no_secret_is_printed() {
        let config = CoordinatorConfig { bootstrap_token: Some("vt_bootstrap_0123456789abcdef".into()), ..config() };
        let text = format!("{config:?}");
        assert!(!text.contains("0123456789abcdef") && !text.contains("hidden"), "{text}");
    }
}
