//! Everything that can go wrong between a program and a cluster.
//!
//! Owns the one error type, its code for programs, and whether trying again can help. Does not own trying again (`http`).

use std::error::Error as StdError;
use std::io;
use std::path::PathBuf;

use volley_jobspecs::api::{ErrorBody, ProblemView};
use volley_jobspecs::problem::Problems;

/// What went wrong, where, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody said which cluster.
    #[error(
        "no cluster is known: VOLLEY_URL is not set and there is no {}; start one here with `volley up`, or set VOLLEY_URL and VOLLEY_TOKEN",
        .looked.display()
    )]
    NoCluster {
        /// The file that was looked for.
        looked: PathBuf,
    },
    /// A setting can't be used.
    #[error("{setting} can't be used: {why}")]
    Setting {
        /// Which one, as the user knows it.
        setting: String,
        /// What is wrong with it and what is allowed.
        why: String,
    },
    /// The spec has problems; nothing was sent.
    #[error("{0}")]
    BadSpec(#[from] Problems),
    /// No connection.
    #[error("can't reach the cluster at {endpoint} to {doing}: {}; is it running, and is the address right?", root_cause(.source))]
    Unreachable {
        /// Where.
        endpoint: String,
        /// What the request was for.
        doing: String,
        /// The client's own error.
        source: reqwest::Error,
    },
    /// The connection broke before the whole answer was there.
    #[error("the connection to {endpoint} broke while it was to {doing}: {why}; the request may have been carried out")]
    Broken {
        /// Where.
        endpoint: String,
        /// What the request was for.
        doing: String,
        /// How it broke.
        why: String,
    },
    /// The cluster ended what it had begun, and said why.
    #[error("the cluster ended what was to {doing}: {why}")]
    Ended {
        /// What the request was for.
        doing: String,
        /// What it said.
        why: String,
    },
    /// No answer in time.
    #[error("no answer from {endpoint} within {seconds} s to {doing}; the request may have been carried out")]
    Silent {
        /// Where.
        endpoint: String,
        /// What the request was for.
        doing: String,
        /// How long it was waited.
        seconds: u64,
    },
    /// The cluster said no.
    #[error("{}", .body.message)]
    Refused {
        /// HTTP status.
        status: u16,
        /// What the request was for.
        doing: String,
        /// What the cluster said.
        body: ErrorBody,
    },
    /// The answer isn't what the API says.
    #[error("the answer of {endpoint} to {doing} is not one of Volley's: {why}; is the address a Volley coordinator of this version?")]
    Unexpected {
        /// Where.
        endpoint: String,
        /// What the request was for.
        doing: String,
        /// What is wrong with the answer.
        why: String,
    },
    /// A local file.
    #[error("can't {doing} {}: {source}", .path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What was to be done with it, such as `read`.
        doing: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// A transferred file isn't the one it was meant to be.
    #[error("{what} arrived changed: its SHA-256 is {found}, not {wanted}; nothing was kept, try again")]
    Checksum {
        /// Which file.
        what: String,
        /// What it should be.
        wanted: String,
        /// What it is.
        found: String,
    },
    /// An output file's name would leave the directory it is fetched to.
    #[error("the output {path:?} is not fetched: its name would leave the directory; read it with `volley outputs get --stdout`")]
    Path {
        /// Its name.
        path: String,
    },
    /// The system gives no random bytes.
    #[error("the system gives no random bytes: {0}")]
    Random(String),
}

impl Error {
    /// May the same request succeed later without anything being changed?
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Broken { .. } | Self::Silent { .. } | Self::Checksum { .. } => true,
            Self::Refused { body, .. } => body.retryable,
            Self::NoCluster { .. }
            | Self::Setting { .. }
            | Self::BadSpec(_)
            | Self::Ended { .. }
            | Self::Unexpected { .. }
            | Self::File { .. }
            | Self::Path { .. }
            | Self::Random(_) => false,
        }
    }

    /// Is it sure that the request was not carried out?
    #[must_use]
    pub fn is_undone(&self) -> bool {
        match self {
            Self::Broken { .. } | Self::Ended { .. } | Self::Silent { .. } | Self::Checksum { .. } | Self::Unexpected { .. } => false,
            Self::Unreachable { source, .. } => source.is_connect(),
            Self::NoCluster { .. }
            | Self::Setting { .. }
            | Self::BadSpec(_)
            | Self::Refused { .. }
            | Self::File { .. }
            | Self::Path { .. }
            | Self::Random(_) => true,
        }
    }

    /// A stable word for programs. For what the cluster refused it is the cluster's: `not_found`, `conflict`, `overloaded`, ….
    #[must_use]
    pub fn code(&self) -> &str {
        match self {
            Self::NoCluster { .. } => "no_cluster",
            Self::Setting { .. } => "bad_setting",
            Self::BadSpec(_) => "bad_spec",
            Self::Unreachable { .. } => "unreachable",
            Self::Broken { .. } => "connection_broken",
            Self::Ended { .. } => "ended",
            Self::Silent { .. } => "no_answer",
            Self::Refused { body, .. } => &body.code,
            Self::Unexpected { .. } => "unexpected_answer",
            Self::File { .. } => "local_file",
            Self::Checksum { .. } => "checksum",
            Self::Path { .. } => "unsafe_path",
            Self::Random(_) => "no_randomness",
        }
    }

    /// HTTP status of the cluster's answer, if it was that.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// The same as the API would say it: what the command line prints for programs.
    #[must_use]
    pub fn to_body(&self) -> ErrorBody {
        let problems = match self {
            Self::BadSpec(problems) => problems.0.iter().map(|p| ProblemView { path: p.path.clone(), message: p.explanation() }).collect(),
            Self::Refused { body, .. } => body.problems.clone(),
            _ => Vec::new(),
        };
        ErrorBody { code: self.code().to_owned(), message: self.to_string(), retryable: self.is_retryable(), problems }
    }
}

/// The innermost cause: "connection refused" says more than "error sending request".
pub(crate) fn root_cause(error: &(dyn StdError + 'static)) -> String {
    let mut cause: &dyn StdError = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(status: u16, code: &str, retryable: bool) -> Error {
        let body = ErrorBody { code: code.into(), message: "m".into(), retryable, problems: Vec::new() };
        Error::Refused { status, doing: "d".into(), body }
    }

    #[test]
    fn the_cluster_decides_whether_what_it_refused_may_be_tried_again() {
        assert!(refused(503, "overloaded", true).is_retryable());
        assert!(!refused(404, "not_found", false).is_retryable());
        assert_eq!(refused(409, "conflict", false).code(), "conflict");
        assert_eq!(refused(409, "conflict", false).status(), Some(409));
    }

    #[test]
    fn a_lost_answer_is_never_taken_for_a_request_that_was_not_carried_out() {
        let broken = Error::Broken { endpoint: "e".into(), doing: "d".into(), why: "w".into() };
        let silent = Error::Silent { endpoint: "e".into(), doing: "d".into(), seconds: 1 };
        assert!(!broken.is_undone() && !silent.is_undone());
        assert!(refused(503, "overloaded", true).is_undone());
    }
}
