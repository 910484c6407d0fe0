//! The client: connections to the coordinators of one cluster.
//!
//! Owns making it, and what all requests share: addresses, token, the sequence seen last. Does not own requests (`http`) or what
//! they ask for (`submit`, `jobs`, `results`, …).

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use reqwest::Url;
use reqwest::redirect::Policy;

use crate::config::{Config, OnRetry, Retry};
use crate::error::{Error, root_cause};

/// Longest wait for a connection: a host that is there answers within a round trip.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// How long a connection may be idle before the system asks whether the other side is still there.
const KEEPALIVE: Duration = Duration::from_secs(15);
/// How long a connection is kept for the next request: coordinators close what was idle for 30 s, and a request that meets the close is
/// lost.
const IDLE_MAX: Duration = Duration::from_secs(20);

/// A client of one cluster. Cheap to clone; clones share connections, and a read by one sees what another wrote.
#[derive(Clone)]
pub struct Client {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) http: reqwest::Client,
    endpoints: Vec<Url>,
    /// Which endpoint is used; only ever counted up.
    turn: AtomicUsize,
    pub(crate) token: Option<String>,
    pub(crate) tenant: Option<String>,
    pub(crate) retry: Retry,
    pub(crate) on_retry: Option<OnRetry>,
    /// Highest log sequence any answer reflected; 0: none answered yet.
    sequence: AtomicU64,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let endpoints: Vec<&str> = self.shared.endpoints.iter().map(Url::as_str).collect();
        f.debug_struct("Client").field("endpoints", &endpoints).finish_non_exhaustive()
    }
}

impl Client {
    /// A client. Nothing is sent yet.
    ///
    /// # Errors
    /// [`Error::Setting`] when an address, the token or the system's certificates can't be used.
    pub fn new(config: Config) -> Result<Self, Error> {
        let endpoints = config.endpoints.iter().map(|text| endpoint("the cluster's address", text)).collect::<Result<Vec<Url>, Error>>()?;
        if endpoints.is_empty() {
            return Err(Error::Setting { setting: "VOLLEY_URL".into(), why: "it names no address".into() });
        }
        if config.token.as_ref().is_some_and(|token| !token.bytes().all(|b| b.is_ascii_graphic())) {
            let why = "a token has no spaces or line feeds in it; one looks like vt_…".into();
            return Err(Error::Setting { setting: "the token".into(), why });
        }
        let shared = Shared {
            http: connections(&endpoints)?,
            endpoints,
            turn: AtomicUsize::new(0),
            token: config.token,
            tenant: config.tenant,
            retry: config.retry,
            on_retry: config.on_retry,
            sequence: AtomicU64::new(0),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// A client of the cluster that the environment or the cluster file names.
    ///
    /// # Errors
    /// As [`Config::from_env`] and [`Client::new`].
    pub fn from_env() -> Result<Self, Error> {
        Self::new(Config::from_env()?)
    }

    /// The address in use.
    #[must_use]
    pub fn endpoint(&self) -> String {
        self.endpoint_url().as_str().trim_end_matches('/').to_owned()
    }

    /// Highest log sequence that any answer so far reflected. Every request asks to be answered from at least there.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.shared.sequence.load(Ordering::Relaxed)
    }

    /// Takes over what another process saw, so that reads here follow writes there.
    pub fn observe_sequence(&self, sequence: u64) {
        self.shared.sequence.fetch_max(sequence, Ordering::Relaxed);
    }

    pub(crate) fn endpoint_url(&self) -> &Url {
        let turn = self.shared.turn.load(Ordering::Relaxed);
        // `new` takes no empty list.
        &self.shared.endpoints[turn % self.shared.endpoints.len()]
    }

    /// Goes on to the next coordinator, unless another task of this program did so already.
    pub(crate) fn leave_endpoint(&self, failed: &Url) {
        let turn = self.shared.turn.load(Ordering::Relaxed);
        if &self.shared.endpoints[turn % self.shared.endpoints.len()] == failed {
            // Losing this race means somebody else went on, which is as good.
            let _ = self.shared.turn.compare_exchange(turn, turn.wrapping_add(1), Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

/// Reads an address; `whose` it is stands in the error.
fn endpoint(whose: &str, text: &str) -> Result<Url, Error> {
    let bad = |why: String| Error::Setting { setting: format!("{whose} {text:?}"), why };
    let url = Url::parse(text).map_err(|error| bad(format!("{error}; one looks like http://127.0.0.1:7800")))?;
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
        return Err(bad("it should begin with http:// or https:// and a host".into()));
    }
    Ok(url)
}

fn connections(endpoints: &[Url]) -> Result<reqwest::Client, Error> {
    // The first provider stays; that another was installed by the program is fine.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut builder = reqwest::Client::builder()
        .user_agent(concat!("volley-sdk/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CONNECT_MAX)
        .tcp_keepalive(KEEPALIVE)
        .pool_idle_timeout(IDLE_MAX)
        .tcp_nodelay(true)
        // A redirect would carry the token to an address nobody configured.
        .redirect(Policy::none());
    if endpoints.iter().all(|url| url.scheme() == "http") {
        // Otherwise a host without any CA certificates couldn't speak to its own loopback.
        builder = builder.tls_certs_only(Vec::new());
    }
    if endpoints.iter().all(is_loopback) {
        builder = builder.no_proxy();
    }
    builder.build().map_err(|error| Error::Setting {
        setting: "TLS".into(),
        why: format!("{}; install the package ca-certificates", root_cause(&error)),
    })
}

/// The HTTP client that this SDK would use for an address: for programs that speak to others beside the cluster, such as a collector
/// of traces, and want the same TLS.
///
/// # Errors
/// [`Error::Setting`] when the address or the system's certificates can't be used.
pub fn http_client_for(url: &str) -> Result<reqwest::Client, Error> {
    connections(&[endpoint("the address", url)?])
}

fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    host == "localhost" || host.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(endpoints: &[&str]) -> Result<Client, Error> {
        Client::new(Config::new(endpoints.iter().map(ToString::to_string).collect(), Some("vt_a_b".into())))
    }

    #[test]
    fn addresses_that_can_not_be_one_are_refused_by_name() {
        for bad in ["", "127.0.0.1:7800", "ftp://a", "http://"] {
            let refused = client(&[bad]);
            assert!(matches!(refused, Err(Error::Setting { .. })), "{bad}: {refused:?}");
        }
        assert!(client(&[]).is_err());
        let token = Client::new(Config::new(vec!["http://a".into()], Some("a b".into())));
        assert!(token.is_err());
    }

    #[test]
    fn an_endpoint_is_left_once_however_many_requests_failed_on_it() {
        let client = client(&["http://127.0.0.1:1", "http://127.0.0.1:2", "http://[::1]:3"]).unwrap_or_else(|e| panic!("{e}"));
        let first = client.endpoint_url().clone();
        client.leave_endpoint(&first);
        client.leave_endpoint(&first);
        assert_eq!(client.endpoint(), "http://127.0.0.1:2");
        assert!(is_loopback(&first));
    }

    #[test]
    fn the_sequence_never_goes_back() {
        let client = client(&["http://127.0.0.1:1"]).unwrap_or_else(|e| panic!("{e}"));
        client.observe_sequence(7);
        client.observe_sequence(3);
        assert_eq!(client.sequence(), 7);
    }
}
