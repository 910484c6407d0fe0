//! Output files.
//!
//! Owns listing them, reading them as they come, and fetching them to files that are whole and have the right checksum, or aren't
//! there. Does not own where they lie in the bucket.

use std::path::{Component, Path, PathBuf};

use bytes::Bytes;
use sha2::{Digest as _, Sha256};
use tokio::io::AsyncWriteExt as _;
use volley_jobspecs::api::OutputFile;
use volley_jobspecs::ids::JobId;

use crate::client::Client;
use crate::error::Error;
use crate::http::{Answer, Call, Repeat};

/// An output file as it comes. Its bytes are not checked: compare with [`OutputFile::sha256`] when that matters.
#[derive(Debug)]
pub struct Output {
    answer: Answer,
}

impl Output {
    /// The next bytes; `None` at the end.
    ///
    /// # Errors
    /// A connection that broke.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, Error> {
        self.answer.chunk().await
    }
}

impl Client {
    /// The output files of a task: of the attempt that decided it, or of another one.
    ///
    /// # Errors
    /// Code `not_found` when there is no such job, task or attempt.
    pub async fn outputs(&self, job: JobId, index: u32, attempt: Option<u32>) -> Result<Vec<OutputFile>, Error> {
        let path = ["jobs", &job.to_string(), "tasks", &index.to_string(), "outputs"];
        self.json(&Call::get(&path, format!("list the outputs of task {index} of {job}")).query_if("attempt", attempt)).await
    }

    /// Opens an output file by its path.
    ///
    /// # Errors
    /// Code `not_found` when there is no such file.
    pub async fn output(&self, job: JobId, index: u32, attempt: Option<u32>, path: &str) -> Result<Output, Error> {
        Ok(Output { answer: self.open(&output_call(job, index, attempt, path)).await? })
    }

    /// Fetches an output file to below `dir`, under its own path; gives the path it has there. `progress` is told of the bytes of
    /// each piece.
    ///
    /// # Errors
    /// [`Error::Path`] when its path would leave `dir`, [`Error::Checksum`] when it arrived changed, [`Error::File`].
    pub async fn fetch_output(
        &self,
        job: JobId,
        index: u32,
        attempt: Option<u32>,
        file: &OutputFile,
        dir: &Path,
        progress: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<PathBuf, Error> {
        let target = below(dir, &file.path)?;
        if let Some(parent) = target.parent() {
            tokio::fs::create_dir_all(parent).await.map_err(at(parent, "make the directory"))?;
        }
        let mut name = target.file_name().unwrap_or_default().to_owned();
        name.push(".part");
        let part = target.with_file_name(name);
        let call = output_call(job, index, attempt, &file.path);
        let fetched =
            self.retry(Repeat::Always, || async { write_checked(self.send_once(&call).await?, file, &part, progress).await }).await;
        if let Err(error) = fetched {
            // Half a file is of no use to anybody; that it may not have been made is no second error.
            let _ = tokio::fs::remove_file(&part).await;
            return Err(error);
        }
        tokio::fs::rename(&part, &target).await.map_err(at(&target, "write"))?;
        Ok(target)
    }
}

fn output_call(job: JobId, index: u32, attempt: Option<u32>, path: &str) -> Call {
    let mut segments = vec!["jobs".to_owned(), job.to_string(), "tasks".to_owned(), index.to_string(), "outputs".to_owned()];
    segments.extend(path.split('/').map(ToOwned::to_owned));
    Call::get(&segments, format!("fetch the output {path} of task {index} of {job}")).query_if("attempt", attempt)
}

fn at(path: &Path, doing: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { path, doing, source }
}

/// Where a task's own name for a file leads below `dir`. The name comes from code that nobody trusts.
fn below(dir: &Path, path: &str) -> Result<PathBuf, Error> {
    let safe = !path.is_empty() && !path.contains('\0') && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
    if safe { Ok(dir.join(path)) } else { Err(Error::Path { path: path.to_owned() }) }
}

async fn write_checked(mut answer: Answer, file: &OutputFile, part: &Path, progress: &(dyn Fn(u64) + Send + Sync)) -> Result<(), Error> {
    let mut out = tokio::fs::File::create(part).await.map_err(at(part, "write"))?;
    let mut hash = Sha256::new();
    while let Some(chunk) = answer.chunk().await? {
        hash.update(&chunk);
        out.write_all(&chunk).await.map_err(at(part, "write"))?;
        progress(chunk.len() as u64);
    }
    out.flush().await.map_err(at(part, "write"))?;
    let found = hex::encode(hash.finalize());
    if found == file.sha256 { Ok(()) } else { Err(Error::Checksum { what: file.path.clone(), wanted: file.sha256.clone(), found }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_of_a_file_leads_out_of_the_directory() {
        for bad in ["", "/etc/passwd", "../x", "a/../../x", "..", "a\0b"] {
            assert!(below(Path::new("/d"), bad).is_err(), "{bad:?}");
        }
        assert_eq!(below(Path::new("/d"), "a/b.txt").ok(), Some(PathBuf::from("/d/a/b.txt")));
    }
}
