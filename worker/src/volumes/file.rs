//! A volume as a file: the program that shows it, from its start to its end.
//!
//! Owns the process. It must not end under somebody who uses the file, so nothing here ends it but unmounting. Does not own what is mounted on top (`mount`).

use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStderr};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::mount;
use super::programs::{Programs, READY, Shown};

/// How long it may take until the file can be opened: the server is there, so it is milliseconds.
const READY_WAIT: Duration = Duration::from_secs(20);
/// How long it may take to end once nothing is mounted any more.
const END_WAIT: Duration = Duration::from_secs(10);
/// Longest line that is kept of what it says.
const LINE_BYTES_MAX: u64 = 2_000;

/// A file that shows a volume.
#[derive(Debug)]
pub struct ShownFile {
    path: PathBuf,
    /// How it ended, and what it said last.
    ended: watch::Receiver<Option<String>>,
    /// Who tells of an end that nobody wanted; nobody once it is hidden.
    watching: Option<AbortOnDropHandle<()>>,
}

impl ShownFile {
    /// Shows it; the file can be opened when this returns. Dropped before that, the file may still come to be: `mount::abort_file` ends it.
    ///
    /// # Errors
    /// In words.
    pub async fn show(programs: &Programs, shown: &Shown<'_>) -> Result<Self, String> {
        let mut child = programs.start_file(shown).map_err(|e| format!("{}: {e}", programs.path.display()))?;
        let (said, errors) = (child.stdout.take(), child.stderr.take());
        let (tell, mut ended) = watch::channel(None);
        tokio::spawn(follow(child, errors, tell));
        let ready = async {
            let Some(mut said) = said else { return false };
            let mut byte = [0];
            while said.read_exact(&mut byte).await.is_ok() {
                if byte == [READY] {
                    return true;
                }
            }
            false
        };
        match tokio::time::timeout(READY_WAIT, ready).await {
            Ok(true) => Ok(Self { path: shown.file.to_owned(), ended, watching: None }),
            Ok(false) => {
                let why = tokio::time::timeout(END_WAIT, ended.wait_for(Option::is_some)).await;
                let why = why.ok().and_then(Result::ok).and_then(|why| why.clone());
                Err(why.unwrap_or_else(|| "the program that shows it said nothing".to_owned()))
            }
            Err(_late) => Err(format!("the program that shows it was not ready within {} s", READY_WAIT.as_secs())),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Tells `whom`, should the program end while the file is shown: whoever uses it is told of errors then.
    pub fn watch(&mut self, whom: impl FnOnce(String) + Send + 'static) {
        let ended = self.ended();
        self.watching = Some(AbortOnDropHandle::new(tokio::spawn(async move { whom(ended.await) })));
    }

    /// Waits until the program has ended, and says how.
    fn ended(&self) -> impl Future<Output = String> + Send + use<> {
        let mut ended = self.ended.clone();
        async move {
            let why = ended.wait_for(Option::is_some).await.ok().and_then(|why| why.clone());
            why.unwrap_or_else(|| "nobody follows it any more".to_owned())
        }
    }

    /// Unmounts it, and waits until the program has ended. `wanted`: everything that was written must have reached the volume.
    ///
    /// # Errors
    /// Somebody uses it; it is ended all the same, and they are told of errors.
    pub async fn hide(mut self, wanted: bool) -> Result<(), mount::MountError> {
        self.watching = None;
        let path = self.path.clone();
        let unmount = move || {
            if wanted {
                return mount::unmount_file(&path);
            }
            mount::abort_file(&path);
            Ok(())
        };
        let hidden = tokio::task::spawn_blocking(unmount).await.unwrap_or(Ok(()));
        if tokio::time::timeout(END_WAIT, self.ended()).await.is_err() {
            tracing::warn!(file = %self.path.display(), "what showed a volume as a file has not ended with its mount");
        }
        hidden
    }
}

/// Waits for its end, and passes on what it says.
async fn follow(mut child: Child, errors: Option<ChildStderr>, tell: watch::Sender<Option<String>>) {
    let mut last = String::new();
    if let Some(errors) = errors {
        let mut lines = BufReader::new(errors);
        let mut line = Vec::new();
        while (&mut lines).take(LINE_BYTES_MAX).read_until(b'\n', &mut line).await.is_ok_and(|read| read > 0) {
            crate::vmm::console::plain(String::from_utf8_lossy(&line).trim()).clone_into(&mut last);
            tracing::warn!("showing a volume as a file: {last}");
            line.clear();
        }
    }
    let how = match child.wait().await {
        Ok(status) => words(status),
        Err(e) => e.to_string(),
    };
    let said = if last.is_empty() { how } else { format!("{how}; it said last: {last}") };
    let _ = tell.send(Some(said));
}

fn words(status: ExitStatus) -> String {
    format!("the program that shows it as a file has ended: {status}")
}
