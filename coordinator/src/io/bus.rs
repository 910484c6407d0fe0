//! Core NATS: the connection, its probe, and what workers say and are told.
//!
//! Owns connecting and the subscriptions of a coordinator. Nothing that passes here is a fact.

use std::path::PathBuf;
use std::time::Duration;

use async_nats::{Client, ConnectErrorKind, ConnectOptions, Event};
use tokio::sync::watch;

/// Oldest server that will do (DESIGN §5).
pub const SERVER_MIN: (u64, u64) = (2, 12);

/// How to reach NATS.
#[derive(Debug, Clone, Default)]
pub struct NatsConfig {
    /// `nats://host:port`, several separated by commas.
    pub url: String,
    /// User and password.
    pub user: Option<(String, String)>,
    /// A credentials file.
    pub credentials: Option<PathBuf>,
}

/// Why NATS can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// It was not reached.
    #[error("can't reach NATS at {url}: {why}; is nats-server running there?")]
    Unreachable {
        /// Where.
        url: String,
        /// Why.
        why: String,
    },
    /// It takes nobody with these credentials.
    #[error(
        "NATS at {url} refuses this user: {why}; name one it knows with --nats-user and --nats-password-file (or NATS_USER and \
         NATS_PASSWORD), or --nats-creds"
    )]
    Refused {
        /// Where.
        url: String,
        /// Why.
        why: String,
    },
    /// The credentials file can't be read.
    #[error("can't read the NATS credentials {path}: {why}")]
    Credentials {
        /// Which.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// It is too old.
    #[error("NATS at {url} is nats-server {found}; Volley needs 2.12 or newer")]
    Old {
        /// Where.
        url: String,
        /// Which version.
        found: String,
    },
    /// JetStream is off.
    #[error("NATS at {url} has JetStream off; start it with `-js` or a `jetstream {{}}` block")]
    NoJetStream {
        /// Where.
        url: String,
    },
}

/// Connects and checks that the server will do. The watch counts connections: it moves at each reconnect.
///
/// # Errors
/// [`ConnectError`]: one clear line.
pub async fn connect(config: &NatsConfig, name: &str) -> Result<(Client, watch::Receiver<u64>), ConnectError> {
    let (connections, receiver) = watch::channel(0u64);
    let mut options = ConnectOptions::new()
        .name(name)
        .ping_interval(Duration::from_secs(5))
        .connection_timeout(Duration::from_secs(5))
        .request_timeout(Some(Duration::from_secs(5)))
        .reconnect_delay_callback(|attempts| Duration::from_millis((50 << attempts.min(6)).min(2_000) as u64))
        .event_callback(move |event| {
            match event {
                Event::Connected => connections.send_modify(|n| *n += 1),
                other => tracing::info!(event = %other, "NATS"),
            }
            std::future::ready(())
        });
    if let Some((user, password)) = &config.user {
        options = options.user_and_password(user.clone(), password.clone());
    }
    if let Some(path) = &config.credentials {
        let unreadable = |e: std::io::Error| ConnectError::Credentials { path: path.clone(), why: e.to_string() };
        options = options.credentials_file(path).await.map_err(unreadable)?;
    }
    let servers: Vec<String> = config.url.split(',').map(|url| url.trim().to_owned()).collect();
    let client = options.connect(servers).await.map_err(|e| {
        let (url, why) = (config.url.clone(), e.to_string());
        match e.kind() {
            ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => ConnectError::Refused { url, why },
            _ => ConnectError::Unreachable { url, why },
        }
    })?;
    probe(&client, &config.url)?;
    Ok((client, receiver))
}

fn probe(client: &Client, url: &str) -> Result<(), ConnectError> {
    let info = client.server_info();
    if version(&info.version).is_none_or(|found| found < SERVER_MIN) {
        return Err(ConnectError::Old { url: url.to_owned(), found: info.version });
    }
    if !info.jetstream {
        return Err(ConnectError::NoJetStream { url: url.to_owned() });
    }
    Ok(())
}

fn version(text: &str) -> Option<(u64, u64)> {
    let mut parts = text.split(['.', '-']).map(str::parse);
    Some((parts.next()?.ok()?, parts.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_by_number() {
        assert_eq!(version("2.9.10"), Some((2, 9)));
        assert!(version("2.15.1") >= Some(SERVER_MIN));
        assert!(version("2.9.10") < Some(SERVER_MIN));
        assert_eq!(version("2.12.0-RC.1"), Some((2, 12)));
        assert_eq!(version("x"), None);
    }
}
