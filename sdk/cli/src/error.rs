//! What a verb fails with.
//!
//! Owns the error, its text for people with the next step, and its JSON for programs. Does not own the exit code's number (`exit`).

use std::io;
use std::path::PathBuf;

use volley_jobspecs::api::ErrorBody;
use volley_jobspecs::pages::CutError;
use volley_jobspecs::resolve::ResolveError;
use volley_sdk::Error;

use crate::exit::Exit;
use crate::out::{Format, Out};
use crate::table::count;

/// What a verb fails with.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The SDK's.
    #[error(transparent)]
    Sdk(#[from] Error),
    /// Arguments that don't go together.
    #[error("{0}")]
    Usage(String),
    /// There is no such thing, found out here.
    #[error("{0}")]
    NotFound(String),
    /// The cluster's state doesn't allow it, found out here.
    #[error("{0}")]
    Conflict(String),
    /// A line of a local items file.
    #[error("{}, {error}", .path.display())]
    Items {
        /// Which file.
        path: PathBuf,
        /// Which line, and what is wrong with it.
        error: CutError,
    },
    /// A task that can't be made from its item.
    #[error("task {index} can't be made from its item: {error}")]
    Resolve {
        /// Which task.
        index: u64,
        /// Why.
        error: ResolveError,
    },
    /// Standard output can't be written.
    #[error("can't write to standard output: {0}")]
    Output(io::Error),
    /// Something of the system that isn't a file.
    #[error("can't {doing}: {source}")]
    System {
        /// What was to be done.
        doing: &'static str,
        /// The system's answer.
        source: io::Error,
    },
}

/// What a process that serves, or arguments that can't be read, end with: for people, or one JSON value for programs.
#[must_use]
pub fn failure(out: Out, exit: Exit, message: &str) -> String {
    if out.format != Format::Json {
        return format!("error: {message}\n");
    }
    let (code, retryable) = match exit {
        Exit::BadSpec => ("usage", false),
        Exit::NotFound => ("not_found", false),
        Exit::Conflict => ("conflict", false),
        Exit::Unavailable => ("unavailable", true),
        Exit::TryLater => ("overloaded", true),
        Exit::Denied => ("forbidden", false),
        Exit::NotConfigured => ("not_configured", false),
        Exit::LocalFile => ("local_file", false),
        _ => ("internal", false),
    };
    let body = ErrorBody { code: code.into(), message: message.into(), retryable, problems: Vec::new() };
    // It has text keys only, so this can't fail.
    serde_json::to_string(&body).unwrap_or_default() + "\n"
}

impl CliError {
    /// A local file.
    pub(crate) fn file(path: impl Into<PathBuf>, doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Sdk(Error::File { path, doing, source })
    }

    /// What to exit with. Nobody reading any more is no failure.
    #[must_use]
    pub fn exit(&self) -> Exit {
        match self {
            Self::Sdk(error) => Exit::of_error(error),
            Self::Usage(_) | Self::Items { .. } | Self::Resolve { .. } => Exit::BadSpec,
            Self::NotFound(_) => Exit::NotFound,
            Self::Conflict(_) => Exit::Conflict,
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => Exit::Success,
            Self::Output(_) | Self::System { .. } => Exit::LocalFile,
        }
    }

    fn body(&self) -> ErrorBody {
        let code = match self {
            Self::Sdk(error) => return error.to_body(),
            Self::Usage(_) => "usage",
            Self::NotFound(_) => "not_found",
            Self::Conflict(_) => "conflict",
            Self::Items { .. } => "bad_items",
            Self::Resolve { .. } => "bad_item",
            Self::Output(_) | Self::System { .. } => "local_file",
        };
        ErrorBody { code: code.into(), message: self.to_string(), retryable: false, problems: Vec::new() }
    }

    fn next_step(&self) -> Option<&'static str> {
        match self {
            Self::Sdk(Error::Unreachable { .. }) => Some("`volley up` starts a cluster here; `--url` or VOLLEY_URL names another one"),
            Self::Sdk(Error::Refused { status: 401, .. }) => Some(
                "set VOLLEY_TOKEN, or VOLLEY_CONFIG to the file that `volley up` wrote (an operator makes tokens: `volley token create`)",
            ),
            Self::Sdk(Error::Refused { status: 403, .. }) => Some("use an operator's token (VOLLEY_TOKEN)"),
            _ => None,
        }
    }

    /// The whole text for standard error: for people, or one JSON value for programs. Empty when nobody needs to be told.
    #[must_use]
    pub fn render(&self, format: Format) -> String {
        if matches!(self, Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe) {
            return String::new();
        }
        if format == Format::Json {
            // An error body has text keys only, so this can't fail.
            return serde_json::to_string(&self.body()).unwrap_or_default() + "\n";
        }
        let mut text = format!("error: {}\n", self.message());
        if let Some(next) = self.next_step() {
            text.push_str(&format!("next: {next}\n"));
        }
        text
    }

    /// The message, with the problems of a spec under each other whoever found them.
    fn message(&self) -> String {
        match self {
            Self::Sdk(Error::Refused { body, .. }) if !body.problems.is_empty() => {
                let mut text = format!("{} in the job spec; nothing was created:", count(body.problems.len() as u64, "problem"));
                for (number, problem) in (1..).zip(&body.problems) {
                    text.push_str(&format!("\n  {number}. {}: {}", problem.path, problem.message));
                }
                text
            }
            other => other.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use volley_jobspecs::api::ProblemView;
    use volley_jobspecs::problem::{Problem, Problems};

    use super::*;

    #[test]
    fn problems_read_the_same_whether_found_here_or_by_the_cluster() {
        let problem = Problem::new("$.task", "missing").hint("add it");
        let view = ProblemView { path: problem.path.clone(), message: problem.explanation() };
        let body = ErrorBody { code: "bad_spec".into(), message: "1 problem".into(), retryable: false, problems: vec![view] };
        let there = CliError::Sdk(Error::Refused { status: 400, doing: "submit the job".into(), body });
        let here = CliError::Sdk(Error::BadSpec(Problems(vec![problem])));
        assert_eq!(here.render(Format::Table), there.render(Format::Table));
        assert_eq!(
            here.render(Format::Json).replace(&here.to_string().replace('\n', "\\n"), ""),
            there.render(Format::Json).replace("1 problem", "")
        );
        assert_eq!((here.exit().code(), there.exit().code()), (2, 2));
    }

    #[test]
    fn what_is_not_there_has_the_code_of_what_is_not_found() {
        let error = CliError::NotFound("there is no output \"a\"".into());
        assert_eq!((error.exit().code(), error.body().code.as_str()), (66, "not_found"));
    }

    #[test]
    fn a_reader_that_left_is_no_failure() {
        let error = CliError::Output(io::ErrorKind::BrokenPipe.into());
        assert_eq!((error.exit(), error.render(Format::Json)), (Exit::Success, String::new()));
    }

    #[test]
    fn a_missing_token_comes_with_the_next_step() {
        let body = ErrorBody { code: "unauthorized".into(), message: "no token".into(), retryable: false, problems: Vec::new() };
        let error = CliError::Sdk(Error::Refused { status: 401, doing: "list the jobs".into(), body });
        assert_eq!(
            error.render(Format::Table),
            "error: no token\nnext: set VOLLEY_TOKEN, or VOLLEY_CONFIG to the file that `volley up` wrote (an operator makes tokens: `volley token create`)\n"
        );
    }
}
