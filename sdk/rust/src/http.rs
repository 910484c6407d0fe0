//! One request and its answer.
//!
//! Owns sending, reading answers, the mapping of failures, and trying again. Does not own what is asked for.
//!
//! What is tried again: no connection, a broken connection, no answer in time, and refusals that the cluster calls retryable. A
//! request that may have been carried out is repeated only where doing it twice is the same as doing it once.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder, Retryable as _};
use reqwest::header::CONTENT_TYPE;
use reqwest::{Body, Method, Response, StatusCode, Url};
use serde::Serialize;
use serde::de::DeserializeOwned;
use volley_jobspecs::api::{ErrorBody, SEQUENCE_HEADER};

use crate::client::Client;
use crate::config::Retry;
use crate::error::{Error, root_cause};
use bytes::Bytes;

/// Longest wait for the head of an answer: a coordinator waits up to 10 s for its log to catch up, and then says so.
const HEAD_MAX: Duration = Duration::from_secs(30);
/// Largest answer that is read as a whole, in bytes: a page of 1,000 attempts with full tails stays far below.
const ANSWER_BYTES_MAX: usize = 64 * 1024 * 1024;

/// May a request be repeated when nobody knows whether it was carried out?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Repeat {
    /// Twice is the same as once.
    Always,
    /// Only when it surely was not.
    IfUndone,
}

/// The path of a request below an endpoint's own. `Url` drops tabs and line ends from what it is given, and names of files may have
/// them, so that everything is encoded before.
fn path(base: &str, segments: &[String]) -> String {
    let mut path = format!("{}/v1", base.trim_end_matches('/'));
    // `.` and `..` would be taken for steps however they are encoded, and name nothing.
    for segment in segments.iter().filter(|segment| !matches!(segment.as_str(), "." | "..")) {
        path.push('/');
        for byte in segment.bytes() {
            // What RFC 3986 lets stand in a segment.
            match char::from(byte) {
                c if c.is_ascii_alphanumeric() || "-._~!$&'()*+,;=:@".contains(c) => path.push(c),
                _ => path.push_str(&format!("%{byte:02X}")),
            }
        }
    }
    path
}

/// A request that can be sent again.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    method: Method,
    path: Vec<String>,
    query: Vec<(&'static str, String)>,
    headers: Vec<(&'static str, String)>,
    body: Option<(&'static str, Bytes)>,
    repeat: Repeat,
    /// Behind "to", for errors: `submit the job`.
    pub(crate) doing: String,
}

impl Call {
    fn new<S: ToString>(method: Method, path: &[S], doing: impl Into<String>) -> Self {
        Self {
            method,
            path: path.iter().map(ToString::to_string).collect(),
            query: Vec::new(),
            headers: Vec::new(),
            body: None,
            repeat: Repeat::Always,
            doing: doing.into(),
        }
    }

    pub(crate) fn get<S: ToString>(path: &[S], doing: impl Into<String>) -> Self {
        Self::new(Method::GET, path, doing)
    }

    pub(crate) fn post<S: ToString>(path: &[S], doing: impl Into<String>) -> Self {
        Self::new(Method::POST, path, doing)
    }

    pub(crate) fn delete<S: ToString>(path: &[S], doing: impl Into<String>) -> Self {
        Self::new(Method::DELETE, path, doing)
    }

    pub(crate) fn query(mut self, name: &'static str, value: impl ToString) -> Self {
        self.query.push((name, value.to_string()));
        self
    }

    pub(crate) fn query_if(self, name: &'static str, value: Option<impl ToString>) -> Self {
        match value {
            Some(value) => self.query(name, value),
            None => self,
        }
    }

    pub(crate) fn header(mut self, name: &'static str, value: impl ToString) -> Self {
        self.headers.push((name, value.to_string()));
        self
    }

    pub(crate) fn json_text(mut self, text: impl Into<Bytes>) -> Self {
        self.body = Some(("application/json", text.into()));
        self
    }

    pub(crate) fn json(self, value: &impl Serialize) -> Self {
        // The API's types have text keys only and no fallible serializers, so this can't fail.
        self.json_text(serde_json::to_vec(value).unwrap_or_default())
    }

    pub(crate) fn once(mut self) -> Self {
        self.repeat = Repeat::IfUndone;
        self
    }
}

/// The head of an answer, and a body that is still coming.
#[derive(Debug)]
pub(crate) struct Answer {
    response: Response,
    endpoint: Url,
    doing: String,
    /// Longest silence.
    silence_max: Duration,
}

impl Answer {
    pub(crate) fn status(&self) -> StatusCode {
        self.response.status()
    }

    /// The next bytes; `None` at the regular end.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>, Error> {
        match tokio::time::timeout(self.silence_max, self.chunk_some_time()).await {
            Ok(chunk) => chunk,
            Err(_) => Err(silent(&self.endpoint, &self.doing, self.silence_max)),
        }
    }

    /// The next bytes, however long they take; `None` at the regular end. A host that has gone is noticed by the system.
    async fn chunk_some_time(&mut self) -> Result<Option<Bytes>, Error> {
        match self.response.chunk().await {
            Ok(chunk) => Ok(chunk),
            Err(error) => Err(self.broken(root_cause(&error))),
        }
    }

    pub(crate) fn broken(&self, why: impl Into<String>) -> Error {
        Error::Broken { endpoint: shown(&self.endpoint), doing: self.doing.clone(), why: why.into() }
    }

    pub(crate) fn unexpected(&self, why: impl Into<String>) -> Error {
        Error::Unexpected { endpoint: shown(&self.endpoint), doing: self.doing.clone(), why: why.into() }
    }

    pub(crate) fn endpoint(&self) -> &Url {
        &self.endpoint
    }

    /// A header of the answer, if it is text.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.response.headers().get(name)?.to_str().ok()
    }

    /// The connection, which is spoken on otherwise from now on.
    pub(crate) async fn upgrade(self) -> Result<(reqwest::Upgraded, String), Error> {
        let endpoint = shown(&self.endpoint);
        match self.response.upgrade().await {
            Ok(connection) => Ok((connection, endpoint)),
            Err(error) => Err(Error::Broken { endpoint, doing: self.doing, why: root_cause(&error) }),
        }
    }

    async fn whole(&mut self) -> Result<Vec<u8>, Error> {
        let mut whole = Vec::new();
        while let Some(chunk) = self.chunk().await? {
            if whole.len() + chunk.len() > ANSWER_BYTES_MAX {
                return Err(self.unexpected(format!("it is longer than {ANSWER_BYTES_MAX} bytes")));
            }
            whole.extend_from_slice(&chunk);
        }
        Ok(whole)
    }

    pub(crate) async fn json<T: DeserializeOwned>(mut self) -> Result<T, Error> {
        let bytes = self.whole().await?;
        serde_json::from_slice(&bytes).map_err(|error| self.unexpected(error.to_string()))
    }

    /// What the cluster said in refusing; other servers' words when it wasn't the cluster.
    async fn refusal(mut self) -> Error {
        let status = self.status();
        let bytes = match self.whole().await {
            Ok(bytes) => bytes,
            Err(error) => return error,
        };
        let body = serde_json::from_slice(&bytes).unwrap_or_else(|_| ErrorBody {
            code: format!("http_{}", status.as_u16()),
            message: format!("{} answered {status} to the request to {}; is that a Volley coordinator?", shown(&self.endpoint), self.doing),
            // What stands between: a proxy that is overloaded or has no coordinator behind it just now.
            retryable: matches!(status.as_u16(), 429 | 502 | 503 | 504),
            problems: Vec::new(),
        });
        Error::Refused { status: status.as_u16(), doing: self.doing, body }
    }
}

fn shown(url: &Url) -> String {
    url.as_str().trim_end_matches('/').to_owned()
}

fn silent(endpoint: &Url, doing: &str, waited: Duration) -> Error {
    Error::Silent { endpoint: shown(endpoint), doing: doing.to_owned(), seconds: waited.as_secs() }
}

impl Client {
    /// Sends once, without trying again.
    pub(crate) async fn send_once(&self, call: &Call) -> Result<Answer, Error> {
        let body = call.body.as_ref().map(|(kind, bytes)| (*kind, Body::from(bytes.clone())));
        self.send_body(call, body, Some(HEAD_MAX)).await
    }

    /// Sends once, with a body that can be read once. Without `head_max`, the body may take as long as it takes.
    pub(crate) async fn send_body(
        &self,
        call: &Call,
        body: Option<(&'static str, Body)>,
        head_max: Option<Duration>,
    ) -> Result<Answer, Error> {
        let endpoint = self.endpoint_url().clone();
        let result = self.exchange(call, &endpoint, body, head_max).await;
        if result.as_ref().is_err_and(Error::is_retryable) {
            self.leave_endpoint(&endpoint);
        }
        result
    }

    async fn exchange(
        &self,
        call: &Call,
        endpoint: &Url,
        body: Option<(&'static str, Body)>,
        head_max: Option<Duration>,
    ) -> Result<Answer, Error> {
        let mut url = endpoint.clone();
        url.set_path(&path(endpoint.path(), &call.path));
        let mut request = self.shared.http.request(call.method.clone(), url).query(&call.query);
        if let Some(tenant) = &self.shared.tenant {
            request = request.query(&[("tenant", tenant)]);
        }
        if let Some(token) = &self.shared.token {
            request = request.bearer_auth(token);
        }
        if self.sequence() > 0 {
            request = request.header(SEQUENCE_HEADER, self.sequence());
        }
        for (name, value) in &call.headers {
            request = request.header(*name, value);
        }
        if let Some((kind, body)) = body {
            request = request.header(CONTENT_TYPE, kind).body(body);
        }
        let sent = match head_max {
            Some(head_max) => tokio::time::timeout(head_max, request.send()).await.map_err(|_| silent(endpoint, &call.doing, head_max))?,
            None => request.send().await,
        };
        let response = sent.map_err(|error| failed(error, endpoint, &call.doing))?;
        let sequence = response.headers().get(SEQUENCE_HEADER).and_then(|value| value.to_str().ok()?.parse().ok());
        self.observe_sequence(sequence.unwrap_or(0));
        let silence_max = self.shared.retry.silence_max;
        let answer = Answer { response, endpoint: endpoint.clone(), doing: call.doing.clone(), silence_max };
        let done = answer.status().is_success() || answer.status() == StatusCode::SWITCHING_PROTOCOLS;
        if done { Ok(answer) } else { Err(answer.refusal().await) }
    }

    /// Sends, with further tries; the body is still to be read.
    pub(crate) async fn open(&self, call: &Call) -> Result<Answer, Error> {
        self.retry(call.repeat, || self.send_once(call)).await
    }

    /// Sends and reads the answer, with further tries.
    pub(crate) async fn json<T: DeserializeOwned>(&self, call: &Call) -> Result<T, Error> {
        self.retry(call.repeat, || async { self.send_once(call).await?.json().await }).await
    }

    /// Sends, with further tries; what the answer says doesn't matter.
    pub(crate) async fn done(&self, call: &Call) -> Result<(), Error> {
        self.open(call).await.map(|_| ())
    }

    /// Tries again what may succeed later, within the budget.
    pub(crate) async fn retry<T, F: Future<Output = Result<T, Error>>>(&self, repeat: Repeat, work: impl FnMut() -> F) -> Result<T, Error> {
        work.retry(self.backoff())
            .when(|error| is_worth_waiting(error) && (repeat == Repeat::Always || error.is_undone()))
            .notify(|error, wait| self.tell(error, wait))
            .await
    }

    fn tell(&self, error: &Error, wait: Duration) {
        if let Some(on_retry) = &self.shared.on_retry {
            on_retry(error, wait);
        }
    }

    fn backoff(&self) -> ExponentialBuilder {
        let Retry { first_contact, budget, backoff_first, backoff_max, silence_max: _ } = self.shared.retry;
        ExponentialBuilder::default()
            .with_jitter()
            .with_min_delay(backoff_first)
            .with_max_delay(backoff_max)
            .without_max_times()
            .with_total_delay(Some(if self.sequence() == 0 { first_contact } else { budget }))
    }
}

/// Does a short wait help? A quota is free again when jobs end, which the caller knows more about.
fn is_worth_waiting(error: &Error) -> bool {
    error.is_retryable() && error.code() != "quota"
}

fn failed(error: reqwest::Error, endpoint: &Url, doing: &str) -> Error {
    let (endpoint, doing) = (shown(endpoint), doing.to_owned());
    if error.is_connect() {
        Error::Unreachable { endpoint, doing, source: error.without_url() }
    } else {
        Error::Broken { endpoint, doing, why: root_cause(&error) }
    }
}

/// How long a stream goes on trying to come back; counted anew after each thing it brought.
#[derive(Debug)]
pub(crate) struct Patience {
    client: Client,
    waits: Option<ExponentialBackoff>,
}

impl Patience {
    pub(crate) fn new(client: Client) -> Self {
        Self { client, waits: None }
    }

    /// Something came.
    pub(crate) fn renew(&mut self) {
        self.waits = None;
    }

    /// Waits before the next try.
    ///
    /// # Errors
    /// The error itself, when there is to be no next try.
    pub(crate) async fn wait(&mut self, error: Error, endpoint: Option<&Url>) -> Result<(), Error> {
        if !is_worth_waiting(&error) {
            return Err(error);
        }
        if let Some(endpoint) = endpoint {
            self.client.leave_endpoint(endpoint);
        }
        let waits = self.waits.get_or_insert_with(|| self.client.backoff().build());
        let Some(wait) = waits.next() else {
            return Err(error);
        };
        self.client.tell(&error, wait);
        tokio::time::sleep(wait).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_name_of_a_file_comes_through_as_it_is() {
        let mut url = Url::parse("http://host/below/").expect("a URL");
        let names = ["a\nb\tc\rd", "per%cent", "100%0A", "ü ?#[x]", "a\\b", "jobs:cancel", "."];
        url.set_path(&path(url.path(), &names.map(str::to_owned)));
        assert_eq!(url.as_str(), "http://host/below/v1/a%0Ab%09c%0Dd/per%25cent/100%250A/%C3%BC%20%3F%23%5Bx%5D/a%5Cb/jobs:cancel");
    }
}
