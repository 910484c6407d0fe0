//! The terminal that a command in a machine is shown on: its size, and what is typed passed on as it is.
//!
//! Owns raw mode, and that the terminal is again as it was, however the verb ends. Does not own what is passed (`verbs/exec`).

use std::io::{self, IsTerminal as _};

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use volley_sdk::Tty;

/// The size of a terminal that doesn't say its own.
const SIZE_DEFAULT: Tty = Tty { rows: 24, cols: 80 };

/// Do both standard input and output belong to a terminal?
#[must_use]
pub fn is_there() -> bool {
    io::stdin().is_terminal() && io::stdout().is_terminal()
}

/// Its size now.
#[must_use]
pub fn size() -> Tty {
    match tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => Tty { rows: size.ws_row, cols: size.ws_col },
        _ => SIZE_DEFAULT,
    }
}

/// As long as this lives, what is typed comes as it is: no lines, no echo, no signals. Then it is as before.
#[derive(Debug)]
pub struct Raw(Termios);

impl Raw {
    /// Begins.
    ///
    /// # Errors
    /// What the system says: it is no terminal.
    pub fn begin() -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Self(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // A terminal that has gone needs nothing.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
    }
}
