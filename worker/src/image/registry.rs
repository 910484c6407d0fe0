//! Fetching from a registry: <https://github.com/opencontainers/distribution-spec/blob/main/spec.md>, with tokens as in
//! <https://distribution.github.io/distribution/spec/auth/token/>.
//!
//! Owns the requests, who asks (nobody, a user, a token), what is tried again and where a cut transfer goes on. Every blob is checked
//! against its digest and size before it is kept. Plain HTTP is spoken to this machine only, unless asked for. Does not own what
//! documents say (`oci`).

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use reqwest::header::{ACCEPT as ACCEPT_HEADER, AUTHORIZATION, RANGE, WWW_AUTHENTICATE};
use reqwest::{Client, Response, StatusCode, Url};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncSeekExt, AsyncWriteExt};

use super::oci::{ACCEPT, DOCUMENT_BYTES_MAX, Digest, DocumentError, Named, digest_of, digest_of_bytes};
use super::store::{PutError, Store};
use crate::error::chain;
use volley_jobspecs::image::{Reference, Wanted};

/// How long a registry may take to accept a connection.
const CONNECT_TIME: Duration = Duration::from_secs(10);
/// How long nothing may come before a transfer counts as broken.
const READ_TIME: Duration = Duration::from_secs(30);
/// Tries of one blob or document that bring nothing new, with pauses from 200 ms doubling: about half a minute of trouble at the other end.
const TRIES: usize = 7;
/// Largest answer of a token server, in bytes: tokens are a few kilobytes.
const TOKEN_BYTES_MAX: u64 = 256 * 1024;

/// A user of a registry.
#[derive(Clone)]
pub struct Credentials {
    /// Its name.
    pub user: String,
    /// Its password, or a token that stands for one.
    pub password: String,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("user", &self.user).finish_non_exhaustive()
    }
}

/// What can't be fetched.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// No client can be made.
    #[error("no HTTP client: {0}")]
    Client(String),
    /// The registry doesn't let us.
    #[error("{url}: the registry refused it ({status}); is the name right, and does it want credentials?")]
    Refused {
        /// What was asked for.
        url: String,
        /// Its answer.
        status: StatusCode,
    },
    /// It is not there.
    #[error("{url}: the registry doesn't have it ({status})")]
    Missing {
        /// What was asked for.
        url: String,
        /// Its answer.
        status: StatusCode,
    },
    /// The registry or the network stays in trouble.
    #[error("{url}: {why}")]
    Failed {
        /// What was asked for.
        url: String,
        /// The last trouble.
        why: String,
    },
    /// It wants to know who asks in a way that is not known here, or would have us tell it in the open.
    #[error("{url}: the registry asks for credentials in a way that can't be followed: {why}")]
    Challenge {
        /// What was asked for.
        url: String,
        /// What is wrong.
        why: String,
    },
    /// A document is something else than was asked for.
    #[error("{url}: {source}")]
    Document {
        /// What was asked for.
        url: String,
        /// What is wrong with it.
        source: DocumentError,
    },
    /// A blob is not what was asked for, or can't be kept.
    #[error("{url}: {source}")]
    Put {
        /// What was asked for.
        url: String,
        /// What is wrong.
        source: PutError,
    },
}

impl RegistryError {
    /// May the next try go better?
    fn passes(&self) -> bool {
        match self {
            Self::Failed { .. } => true,
            Self::Put { .. } | Self::Client(_) | Self::Refused { .. } => false,
            Self::Missing { .. } | Self::Challenge { .. } | Self::Document { .. } => false,
        }
    }
}

/// One repository of a registry.
#[derive(Debug)]
pub struct Registry {
    client: Client,
    base: String,
    repository: String,
    plain: bool,
    credentials: Option<Credentials>,
    /// The header that says who asks, once that was asked for.
    authorization: Option<String>,
}

impl Registry {
    /// The repository of `reference`. `plain_http`: without encryption, which is what this machine's own registries speak anyway.
    ///
    /// # Errors
    /// [`RegistryError::Client`].
    pub fn new(reference: &Reference, plain_http: bool, credentials: Option<Credentials>) -> Result<Self, RegistryError> {
        let plain = plain_http || reference.is_loopback();
        // Whoever came first has set the same one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder()
            .connect_timeout(CONNECT_TIME)
            .read_timeout(READ_TIME)
            // Also where it is sent on to.
            .https_only(!plain)
            .user_agent(concat!("volley/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|e| RegistryError::Client(chain(&e)))?;
        let base = format!("{}://{}/v2/{}", if plain { "http" } else { "https" }, reference.host(), reference.repository);
        Ok(Self { client, base, repository: reference.repository.clone(), plain, credentials, authorization: None })
    }

    /// An index or manifest, with its digest. What is named by a digest is checked.
    ///
    /// # Errors
    /// [`RegistryError`].
    pub async fn manifest(&mut self, wanted: &Wanted) -> Result<(Vec<u8>, Digest), RegistryError> {
        let (name, digest) = match wanted {
            Wanted::Tag(tag) => (tag.clone(), None),
            Wanted::Digest(digest) => (digest.to_string(), Some(digest)),
        };
        self.document(&format!("{}/manifests/{name}", self.base), digest).await
    }

    /// A configuration.
    ///
    /// # Errors
    /// [`RegistryError`].
    pub async fn config(&mut self, named: &Named) -> Result<Vec<u8>, RegistryError> {
        let url = format!("{}/blobs/{}", self.base, named.digest);
        Ok(self.document(&url, Some(&named.digest)).await?.0)
    }

    async fn document(&mut self, url: &str, wanted: Option<&Digest>) -> Result<(Vec<u8>, Digest), RegistryError> {
        let mut pauses = pauses();
        loop {
            match self.document_once(url, wanted).await {
                Err(why) if why.passes() => match pauses.next() {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => return Err(why),
                },
                done => return done,
            }
        }
    }

    async fn document_once(&mut self, url: &str, wanted: Option<&Digest>) -> Result<(Vec<u8>, Digest), RegistryError> {
        let answer = self.get(url, 0).await?;
        let bytes = read_all(answer, DOCUMENT_BYTES_MAX).await.map_err(|why| why.at(url))?;
        let found = digest_of_bytes(&bytes);
        match wanted {
            Some(wanted) if *wanted != found => {
                Err(RegistryError::Put { url: url.to_owned(), source: PutError::Digest { wanted: wanted.clone(), found } })
            }
            _ => Ok((bytes, found)),
        }
    }

    /// Fetches a blob into `store`, unless it is there. A transfer that was cut goes on where it ended.
    ///
    /// # Errors
    /// [`RegistryError`].
    pub async fn blob(&mut self, named: &Named, store: &Store) -> Result<(), RegistryError> {
        let url = format!("{}/blobs/{}", self.base, named.digest);
        let kept = |source| RegistryError::Put { url: url.clone(), source: PutError::Io { dir: store.dir().to_owned(), source } };
        if store.has_blob(named).map_err(kept)? {
            return Ok(());
        }
        // What came whole and wrong may have been damaged on the way: it is fetched once more.
        for last in [false, true] {
            let incoming = store.incoming().map_err(kept)?;
            let mut part = Part { file: incoming.file.try_clone().map_err(kept)?.into(), hash: Sha256::new(), bytes: 0 };
            self.blob_parts(&url, named, &mut part).await?;
            let (store, named, found) = (store.clone(), named.clone(), digest_of(part.hash));
            // Flushing a large file takes its time.
            let done = tokio::task::spawn_blocking(move || store.keep_blob(incoming, &named, found, part.bytes)).await;
            match done {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(PutError::Digest { .. })) if !last => {}
                Ok(Err(source)) => return Err(RegistryError::Put { url, source }),
                Err(stopped) => return Err(RegistryError::Failed { url, why: stopped.to_string() }),
            }
        }
        Ok(())
    }

    /// Fetches until everything is there.
    async fn blob_parts(&mut self, url: &str, named: &Named, part: &mut Part) -> Result<(), RegistryError> {
        let mut pauses = pauses();
        loop {
            let before = part.bytes;
            let why = match self.blob_once(url, named, part).await {
                Err(why) if why.passes() => why,
                done => return done,
            };
            if part.bytes > before {
                // It goes on, if slowly.
                pauses = self::pauses();
            }
            let Some(pause) = pauses.next() else { return Err(why) };
            tokio::time::sleep(pause).await;
        }
    }

    async fn blob_once(&mut self, url: &str, named: &Named, part: &mut Part) -> Result<(), RegistryError> {
        let failed = |why: String| RegistryError::Failed { url: url.to_owned(), why };
        let kept = |source: std::io::Error| failed(format!("it can't be written: {source}"));
        let mut answer = self.get(url, part.bytes).await?;
        if part.bytes > 0 && answer.status() != StatusCode::PARTIAL_CONTENT {
            // It knows no parts: from the beginning.
            part.file.set_len(0).await.map_err(kept)?;
            part.file.rewind().await.map_err(kept)?;
            (part.hash, part.bytes) = (Sha256::new(), 0);
        }
        while let Some(piece) = answer.chunk().await.map_err(|e| failed(chain(&e)))? {
            if part.bytes + piece.len() as u64 > named.bytes {
                let (wanted, found) = (named.digest.clone(), part.bytes + piece.len() as u64);
                return Err(RegistryError::Document {
                    url: url.to_owned(),
                    source: DocumentError::Bad(format!("{wanted} has {found} bytes or more; {} were announced", named.bytes)),
                });
            }
            part.file.write_all(&piece).await.map_err(kept)?;
            part.hash.update(&piece);
            part.bytes += piece.len() as u64;
        }
        part.file.flush().await.map_err(kept)?;
        match part.bytes < named.bytes {
            true => Err(failed(format!("it ended after {} of {} bytes", part.bytes, named.bytes))),
            false => Ok(()),
        }
    }

    /// One request, with credentials if they were asked for. `from`: which byte to begin with.
    async fn get(&mut self, url: &str, from: u64) -> Result<Response, RegistryError> {
        let mut asked = false;
        loop {
            let mut request = self.client.get(url).header(ACCEPT_HEADER, ACCEPT);
            if let Some(authorization) = &self.authorization {
                request = request.header(AUTHORIZATION, authorization);
            }
            if from > 0 {
                request = request.header(RANGE, format!("bytes={from}-"));
            }
            let answer = request.send().await.map_err(|e| RegistryError::Failed { url: url.to_owned(), why: chain(&e) })?;
            let (status, url) = (answer.status(), url.to_owned());
            match status {
                // A token may have run out: once more with a new one.
                StatusCode::UNAUTHORIZED if !asked => {
                    asked = true;
                    self.authorization = Some(self.authorize(&url, &answer).await?);
                }
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => return Err(RegistryError::Refused { url, status }),
                _ if status.is_success() => return Ok(answer),
                StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => {
                    return Err(RegistryError::Failed { url, why: format!("the registry answered {status}") });
                }
                _ if status.is_client_error() => return Err(RegistryError::Missing { url, status }),
                _ => return Err(RegistryError::Failed { url, why: format!("the registry answered {status}") }),
            }
        }
    }

    /// What a refused request is to be repeated with.
    async fn authorize(&self, url: &str, refused: &Response) -> Result<String, RegistryError> {
        let unknown = |why: &str| RegistryError::Challenge { url: url.to_owned(), why: why.to_owned() };
        let challenges: Vec<&str> = refused.headers().get_all(WWW_AUTHENTICATE).iter().filter_map(|value| value.to_str().ok()).collect();
        let none = || RegistryError::Refused { url: url.to_owned(), status: refused.status() };
        if let Some(challenge) = challenges.iter().find_map(|text| Challenge::bearer(text)) {
            return self.token(url, &challenge).await;
        }
        if challenges.iter().any(|text| text.trim_start().to_ascii_lowercase().starts_with("basic")) {
            return self.credentials.as_ref().map(basic).ok_or_else(none);
        }
        Err(unknown("neither Basic nor Bearer"))
    }

    /// Asks the token server that the registry names.
    async fn token(&self, url: &str, challenge: &Challenge) -> Result<String, RegistryError> {
        #[derive(Deserialize)]
        struct Answer {
            token: Option<String>,
            access_token: Option<String>,
        }
        let unknown = |why: String| RegistryError::Challenge { url: url.to_owned(), why };
        let mut realm =
            Url::parse(&challenge.realm).map_err(|e| unknown(format!("its token server's address {:?}: {e}", challenge.realm)))?;
        if realm.scheme() != "https" && !self.plain {
            return Err(unknown(format!("its token server {realm} is not encrypted")));
        }
        let scope = challenge.scope.clone().unwrap_or_else(|| format!("repository:{}:pull", self.repository));
        realm.query_pairs_mut().append_pair("scope", &scope);
        if let Some(service) = &challenge.service {
            realm.query_pairs_mut().append_pair("service", service);
        }
        let mut request = self.client.get(realm.clone());
        if let Some(credentials) = &self.credentials {
            request = request.header(AUTHORIZATION, basic(credentials));
        }
        let failed = |why: String| RegistryError::Failed { url: realm.to_string(), why };
        let answer = request.send().await.map_err(|e| failed(chain(&e)))?;
        let status = answer.status();
        if status.is_client_error() && status != StatusCode::TOO_MANY_REQUESTS {
            return Err(RegistryError::Refused { url: realm.to_string(), status });
        }
        if !status.is_success() {
            return Err(failed(format!("the token server answered {status}")));
        }
        let bytes = read_all(answer, TOKEN_BYTES_MAX).await.map_err(|why| why.at(realm.as_str()))?;
        let answer: Answer = serde_json::from_slice(&bytes).map_err(|e| unknown(format!("its token server's answer: {e}")))?;
        let token = answer.token.or(answer.access_token).ok_or_else(|| unknown("its token server gave no token".to_owned()))?;
        Ok(format!("Bearer {token}"))
    }
}

/// What has come of a blob.
struct Part {
    file: tokio::fs::File,
    hash: Sha256,
    bytes: u64,
}

/// How a registry asks who we are.
#[derive(Debug, PartialEq, Eq)]
struct Challenge {
    realm: String,
    service: Option<String>,
    scope: Option<String>,
}

impl Challenge {
    /// Reads `Bearer realm="…",service="…",scope="…"`.
    fn bearer(text: &str) -> Option<Self> {
        let (scheme, mut rest) = text.trim_start().split_once(' ')?;
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let (mut realm, mut service, mut scope) = (None, None, None);
        while let Some((key, after)) = rest.split_once('=') {
            let (value, after) = match after.strip_prefix('"') {
                Some(quoted) => quoted.split_once('"')?,
                None => after.split_at(after.find(',').unwrap_or(after.len())),
            };
            match key.trim_matches([' ', ',']).to_ascii_lowercase().as_str() {
                "realm" => realm = Some(value.to_owned()),
                "service" => service = Some(value.to_owned()),
                "scope" => scope = Some(value.to_owned()),
                _ => {}
            }
            rest = after;
        }
        Some(Self { realm: realm?, service, scope })
    }
}

fn basic(credentials: &Credentials) -> String {
    use base64::Engine as _;
    let plain = format!("{}:{}", credentials.user, credentials.password);
    format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(plain))
}

fn pauses() -> impl Iterator<Item = Duration> {
    let backoff = ExponentialBuilder::default().with_min_delay(Duration::from_millis(200)).with_max_delay(Duration::from_secs(10));
    backoff.with_max_times(TRIES - 1).with_jitter().build()
}

/// An answer that can't be read whole.
enum Unread {
    Failed(String),
    Large(u64),
}

impl Unread {
    fn at(self, url: &str) -> RegistryError {
        let url = url.to_owned();
        match self {
            Self::Failed(why) => RegistryError::Failed { url, why },
            Self::Large(bytes) => RegistryError::Document { url, source: DocumentError::Large { bytes } },
        }
    }
}

async fn read_all(mut answer: Response, bytes_max: u64) -> Result<Vec<u8>, Unread> {
    let mut bytes = Vec::new();
    while let Some(piece) = answer.chunk().await.map_err(|e| Unread::Failed(chain(&e)))? {
        bytes.extend_from_slice(&piece);
        if bytes.len() as u64 > bytes_max {
            return Err(Unread::Large(bytes.len() as u64));
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges() {
        let read =
            Challenge::bearer(r#"Bearer realm="https://auth.example/token",service="registry.example",scope="repository:a/b:pull,push""#);
        let want = Challenge {
            realm: "https://auth.example/token".to_owned(),
            service: Some("registry.example".to_owned()),
            scope: Some("repository:a/b:pull,push".to_owned()),
        };
        assert_eq!(read, Some(want));
        let short = Challenge::bearer("bearer realm=http://x/y, error=none").unwrap();
        assert_eq!((short.realm.as_str(), short.service, short.scope), ("http://x/y", None, None));
        for none in ["", "Basic realm=\"x\"", "Bearer", "Bearer service=\"x\"", "Bearer realm=\"x"] {
            assert_eq!(Challenge::bearer(none), None, "{none}");
        }
    }

    #[test]
    fn passwords_are_not_shown() {
        let credentials = Credentials { user: "me".to_owned(), password: "secret".to_owned() };
        assert!(!format!("{credentials:?}").contains("secret"));
        assert_eq!(basic(&credentials), "Basic bWU6c2VjcmV0");
    }

    #[tokio::test]
    async fn who_we_are_is_not_told_in_the_open() {
        let reference = Reference::parse("registry.example/a/b").unwrap();
        let me = Credentials { user: "me".to_owned(), password: "secret".to_owned() };
        let registry = Registry::new(&reference, false, Some(me)).unwrap();
        assert!(registry.base.starts_with("https://registry.example/v2/a/b"), "{}", registry.base);
        let challenge = Challenge { realm: "http://auth.example/token".to_owned(), service: None, scope: None };
        let why = registry.token("https://registry.example/x", &challenge).await.unwrap_err();
        assert!(matches!(&why, RegistryError::Challenge { why, .. } if why.contains("not encrypted")), "{why}");
        // Nor is anything else asked for without encryption.
        let why = registry.client.get("http://registry.example/").send().await.unwrap_err();
        assert!(why.is_builder(), "{why:?}");
    }
}
