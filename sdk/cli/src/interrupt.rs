//! Ctrl-C while a job is followed.
//!
//! Owns the signals, the question, and what its answers mean. Does not own what is done then (`follow`).

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use crate::error::CliError;

/// What the person wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// Leave the job alone and go.
    Detach,
    /// Stop the job.
    Cancel,
    /// Go on as before.
    Keep,
}

/// Interrupts, and the question they lead to.
#[derive(Debug)]
pub struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
    asked: Option<oneshot::Receiver<Choice>>,
}

impl Interrupts {
    /// From now on, interrupts don't end the process.
    ///
    /// # Errors
    /// [`CliError::System`].
    pub fn listen() -> Result<Self, CliError> {
        let listen = |kind| signal(kind).map_err(|source| CliError::System { doing: "listen for signals", source });
        Ok(Self { interrupt: listen(SignalKind::interrupt())?, terminate: listen(SignalKind::terminate())?, asked: None })
    }

    /// The next thing to know: an interrupt that isn't answered yet gives `None` and begins the question (`ask`), an answer or what
    /// counts as one gives it. Nobody at a terminal, a second interrupt, or a termination: detach. Cancel safe.
    pub async fn next(&mut self) -> Option<Choice> {
        let interactive = io::stdin().is_terminal() && io::stderr().is_terminal();
        if let Some(asked) = &mut self.asked {
            let choice = tokio::select! {
                answer = asked => answer.unwrap_or(Choice::Detach),
                _ = self.interrupt.recv() => left(),
                _ = self.terminate.recv() => left(),
            };
            self.asked = None;
            return Some(choice);
        }
        tokio::select! {
            _ = self.interrupt.recv() => (!interactive).then_some(Choice::Detach),
            _ = self.terminate.recv() => Some(Choice::Detach),
        }
    }

    /// Asks. The answer comes through `next`.
    pub fn ask(&mut self) {
        let (send, receive) = oneshot::channel();
        self.asked = Some(receive);
        // A thread of its own: a read of standard input can't be given up, and must not hold up the end of the process.
        std::thread::spawn(move || {
            let choice = read_choice();
            // Nobody waits any more: the job ended, or a second interrupt came.
            let _ = send.send(choice);
        });
    }

    /// Takes an open question away, so that what comes next begins a line of its own.
    pub fn withdraw(&mut self) {
        if self.asked.take().is_some() {
            // A standard error that is gone is nobody's loss.
            let _ = write!(io::stderr(), "\r\x1b[2K");
        }
    }

    /// Is a question open?
    #[must_use]
    pub fn asking(&self) -> bool {
        self.asked.is_some()
    }
}

/// Somebody left without an answer: the question's line ends.
fn left() -> Choice {
    // A standard error that is gone is nobody's loss.
    let _ = writeln!(io::stderr());
    Choice::Detach
}

fn read_choice() -> Choice {
    loop {
        let mut stderr = io::stderr();
        let asked = write!(stderr, "\n[d]etach and let the job go on, [c]ancel the job, [k]eep following (then Enter)? ")
            .and_then(|()| stderr.flush());
        let mut line = String::new();
        match io::stdin().lock().read_line(&mut line) {
            Ok(1..) if asked.is_ok() => {}
            _ => return Choice::Detach,
        }
        if let Some(choice) = choice(&line) {
            return choice;
        }
    }
}

fn choice(line: &str) -> Option<Choice> {
    match line.trim().to_ascii_lowercase().as_str() {
        "d" | "detach" => Some(Choice::Detach),
        "c" | "cancel" => Some(Choice::Cancel),
        "k" | "keep" | "" => Some(Choice::Keep),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_a_letter_or_a_word_and_nothing_cancels_by_accident() {
        assert_eq!(choice("D\n"), Some(Choice::Detach));
        assert_eq!(choice("cancel"), Some(Choice::Cancel));
        assert_eq!(choice("\n"), Some(Choice::Keep));
        assert_eq!(choice("x"), None);
    }
}
