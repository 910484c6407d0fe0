//! Commands that people run in tasks' machines, beside the tasks' own.
//!
//! Owns which machines there are for them, as whom and where they run there, how many there may be, and that all of a machine's end when
//! it has nobody any more to belong to. One session is in `session`; how sessions are spoken in is `io/shells`. Does not own any machine
//! (`runtime/microvm`, `machines/kept`).

pub mod session;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio_util::sync::CancellationToken;
use volley_jobspecs::ids::AttemptName;
use volley_jobspecs::wire::guest::{Exec, User};
use volley_jobspecs::wire::shell::{self, Open, Opened, Refused, SHELL};

use crate::guest::Guest;

/// Shells of one machine: somebody with several windows. Its agent serves 64 calls at once, of which the task's own must find room.
pub const OF_ONE_MAX: usize = 8;
/// Shells of all machines of a worker: each holds up to half a megabyte that is on its way, and two tasks of the runtime.
pub const OF_ALL_MAX: usize = 64;
/// The kind of terminal where nobody says one: the least that programs with windows work on.
const TERM_DEFAULT: &str = "xterm";

/// Machines that are gone and are still known: of more attempts than anybody looks into at once.
const GONE_KEPT: usize = 1_024;

/// Why a machine is not there any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gone {
    /// Its attempt ended, and it was not kept.
    Task,
    /// It was kept for so long.
    Time,
    /// Another one was kept in its place.
    Room,
    /// Somebody wanted it.
    Asked,
    /// Its worker leaves.
    Leaves,
    /// Its VMM ended.
    Died,
}

impl Gone {
    /// In words.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Task => "its task's command has ended",
            Self::Time => "the time it was kept for is over",
            Self::Room => "another failed task's machine was kept in its place, as there was no room for both",
            Self::Asked => "somebody ended it (`volley exec --end`)",
            Self::Leaves => "its worker is stopping",
            Self::Died => "its VMM ended by itself or was killed",
        }
    }
}

/// As whom and where commands run in a machine.
#[derive(Debug, Clone)]
pub struct Place {
    /// Its agent. Weak: a shell is no reason for a machine to live.
    pub guest: Weak<Guest>,
    /// The task's environment.
    pub env: Vec<(String, String)>,
    /// Where its command starts.
    pub cwd: String,
    /// Its user.
    pub user: Option<User>,
}

#[derive(Debug)]
struct Entry {
    place: Place,
    open: usize,
    /// The shells that are open are to end.
    over: CancellationToken,
    /// None may begin.
    closed: bool,
    /// Tells entries of one attempt apart.
    number: u64,
    /// The machine is kept, and to end when this is called.
    kept: Option<CancellationToken>,
}

#[derive(Debug, Default)]
struct State {
    machines: BTreeMap<AttemptName, Entry>,
    /// Those that are gone, the newest last.
    gone: VecDeque<(AttemptName, Gone)>,
    open: usize,
    next: u64,
}

/// The machines that commands can be run in. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Shells(Arc<Mutex<State>>);

/// A machine that is among them. Dropped, it is not any more, and its shells end.
#[derive(Debug)]
pub struct Entered {
    shells: Shells,
    name: AttemptName,
    number: u64,
    why: Gone,
}

/// A shell that may begin. Dropped, there is room for another.
#[derive(Debug)]
pub struct Permit {
    shells: Shells,
    name: AttemptName,
    number: u64,
    /// The machine's agent.
    pub guest: Arc<Guest>,
    /// What it is asked to run.
    pub exec: Exec,
    /// It is to end, as its machine is to be nobody's.
    pub over: CancellationToken,
}

impl Shells {
    /// Each change is one call, so a panic elsewhere leaves nothing half done.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on commands can be run in this attempt's machine.
    #[must_use]
    pub fn enter(&self, name: AttemptName, place: Place) -> Entered {
        let mut state = self.lock();
        state.next += 1;
        let number = state.next;
        let entry = Entry { place, open: 0, over: CancellationToken::new(), closed: false, number, kept: None };
        if let Some(older) = state.machines.insert(name, entry) {
            older.over.cancel();
        }
        Entered { shells: self.clone(), name, number, why: Gone::Task }
    }

    /// May this one begin? Otherwise what is answered.
    ///
    /// # Errors
    /// [`Opened::No`].
    pub fn open(&self, open: &Open) -> Result<Permit, Opened> {
        let no = |kind, text: &str| Opened::No { kind, text: text.to_owned() };
        shell::check(&open.argv, open.term.as_deref()).map_err(|why| no(Refused::BadRequest, &why.to_string()))?;
        let mut state = self.lock();
        if state.open >= OF_ALL_MAX {
            return Err(no(Refused::TooMany, &format!("{OF_ALL_MAX} shells are open on this worker, the most; end one")));
        }
        let guest = state.machines.get(&open.name).filter(|entry| !entry.closed).and_then(|entry| entry.place.guest.upgrade());
        let (Some(guest), Some(entry)) = (guest, state.machines.get_mut(&open.name)) else {
            let text = match (state.machines.contains_key(&open.name), state.why(&open.name)) {
                (true, _) => {
                    "its command has ended and its outputs are being fetched; where the machine is kept, try again in a moment".to_owned()
                }
                (false, Some(why)) => format!("its machine is gone: {}", why.as_str()),
                (false, None) => {
                    "its worker has no machine of it: its command has not begun, or it ended and the machine was not kept".to_owned()
                }
            };
            return Err(no(Refused::NotHere, &text));
        };
        if entry.open >= OF_ONE_MAX {
            return Err(no(Refused::TooMany, &format!("{OF_ONE_MAX} shells are open in this machine, the most; end one")));
        }
        entry.open += 1;
        let (exec, over, number) = (exec(&entry.place, open), entry.over.clone(), entry.number);
        state.open += 1;
        Ok(Permit { shells: self.clone(), name: open.name, number, guest, exec, over })
    }

    /// Ends a machine that is kept. Otherwise what is answered.
    ///
    /// # Errors
    /// [`Opened::No`].
    pub fn end(&self, name: &AttemptName) -> Result<(), Opened> {
        let state = self.lock();
        let no = |kind, text: String| Err(Opened::No { kind, text });
        match (state.machines.get(name), state.why(name)) {
            (Some(Entry { kept: Some(end), .. }), _) => {
                end.cancel();
                Ok(())
            }
            (Some(_), _) => no(
                Refused::Runs,
                "its task still runs in it; `volley cancel --now JOB` stops it, and `--attempt` names an earlier try's machine".to_owned(),
            ),
            (None, Some(why)) => no(Refused::NotHere, format!("{}: {}", shell::GONE, why.as_str())),
            (None, None) => no(Refused::NotHere, "its worker keeps no machine of it".to_owned()),
        }
    }

    /// How many are open.
    #[must_use]
    pub fn count(&self) -> usize {
        self.lock().open
    }
}

impl Entered {
    /// Whose machine it is.
    #[must_use]
    pub fn name(&self) -> AttemptName {
        self.name
    }

    /// Ends the shells that are open, and lets none begin.
    pub fn close(&self) {
        self.change(|entry| {
            std::mem::take(&mut entry.over).cancel();
            entry.closed = true;
        });
    }

    /// Lets none begin for now; those that are open go on.
    pub fn hold(&self) {
        self.change(|entry| entry.closed = true);
    }

    /// Lets them begin again: the machine is kept. What is returned is cancelled when somebody wants it to end.
    #[must_use]
    pub fn reopen(&self) -> CancellationToken {
        let end = CancellationToken::new();
        self.change(|entry| {
            entry.closed = false;
            entry.kept = Some(end.clone());
        });
        end
    }

    /// Changes its entry, unless another machine of the attempt has taken its place.
    fn change(&self, change: impl FnOnce(&mut Entry)) {
        if let Some(entry) = self.shells.lock().machines.get_mut(&self.name).filter(|entry| entry.number == self.number) {
            change(entry);
        }
    }

    /// It is about to go, for this reason.
    pub fn goes(&mut self, why: Gone) {
        self.why = why;
    }
}

impl State {
    /// Why an attempt's machine is gone, if that is still known.
    fn why(&self, name: &AttemptName) -> Option<Gone> {
        self.gone.iter().rev().find(|(other, _)| other == name).map(|(_, why)| *why)
    }
}

impl Permit {
    /// Why the shell is to end.
    #[must_use]
    pub fn why(&self) -> Gone {
        self.shells.lock().why(&self.name).unwrap_or(Gone::Task)
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut state = self.shells.lock();
        if state.machines.get(&self.name).is_some_and(|entry| entry.number == self.number)
            && let Some(entry) = state.machines.remove(&self.name)
        {
            if state.gone.len() >= GONE_KEPT {
                state.gone.pop_front();
            }
            state.gone.push_back((self.name, self.why));
            entry.over.cancel();
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.shells.lock();
        state.open = state.open.saturating_sub(1);
        if let Some(entry) = state.machines.get_mut(&self.name).filter(|entry| entry.number == self.number) {
            entry.open = entry.open.saturating_sub(1);
        }
    }
}

fn exec(place: &Place, open: &Open) -> Exec {
    let mut env = place.env.clone();
    if open.tty.is_some() {
        // Behind the task's own, which was not meant for a terminal; of two the later counts.
        env.push(("TERM".to_owned(), open.term.clone().unwrap_or_else(|| TERM_DEFAULT.to_owned())));
    }
    let argv = if open.argv.is_empty() { vec![SHELL.to_owned()] } else { open.argv.clone() };
    // Without limits: it is beside the task, and what that is told of its memory and processes stays its own.
    Exec {
        argv,
        env,
        cwd: Some(place.cwd.clone()),
        user: place.user.clone(),
        input: true,
        tty: open.tty,
        expendable: true,
        ..Exec::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use volley_jobspecs::ids::JobId;
    use volley_jobspecs::wire::shell::link::{End, Link};
    use volley_jobspecs::wire::shell::{Body, COMMAND_BYTES_MAX, SessionId, Tty, WORDS_MAX};

    fn name(number: u32) -> AttemptName {
        AttemptName { job: JobId(1), stage: 0, index: 2, number, sequence: 4 }
    }

    fn open(number: u32) -> Open {
        Open { name: name(number), session: SessionId::new([0; 16]), argv: Vec::new(), tty: None, term: None, end: false }
    }

    async fn guest() -> Arc<Guest> {
        let (stream, other) = tokio::io::duplex(64);
        // Nobody is there to answer, and nobody is asked.
        std::mem::forget(other);
        Arc::new(Guest::unheard(Box::new(stream)))
    }

    fn place(guest: &Arc<Guest>) -> Place {
        Place { guest: Arc::downgrade(guest), env: vec![("A".into(), "b".into())], cwd: "/w".into(), user: None }
    }

    fn kind<T>(result: Result<T, Opened>) -> Option<Refused> {
        match result {
            Err(Opened::No { kind, .. }) => Some(kind),
            _ => None,
        }
    }

    #[tokio::test]
    async fn machines_come_and_go_and_their_shells_with_them() {
        let (shells, guest) = (Shells::default(), guest().await);
        assert_eq!(kind(shells.open(&open(1))), Some(Refused::NotHere));
        let entered = shells.enter(name(1), place(&guest));
        let first = shells.open(&open(1)).unwrap_or_else(|no| panic!("{no:?}"));
        assert_eq!((first.exec.argv.as_slice(), first.exec.cwd.as_deref()), (["/bin/sh".to_owned()].as_slice(), Some("/w")));
        assert!(first.exec.expendable && first.exec.tty.is_none() && !first.exec.env.iter().any(|(name, _)| name == "TERM"));
        entered.close();
        assert!(first.over.is_cancelled());
        assert_eq!(kind(shells.open(&open(1))), Some(Refused::NotHere));
        assert!(matches!(shells.end(&name(1)), Err(Opened::No { kind: Refused::Runs, .. })), "its task still runs");
        let end = entered.reopen();
        assert!(shells.end(&name(1)).is_ok() && end.is_cancelled());
        let tty = Open { tty: Some(Tty { rows: 1, cols: 1 }), argv: vec!["ls".into()], ..open(1) };
        let second = shells.open(&tty).unwrap_or_else(|no| panic!("{no:?}"));
        assert!(!second.over.is_cancelled());
        assert_eq!(second.exec.env.last().map(|(_, term)| term.as_str()), Some("xterm"));
        assert_eq!(shells.count(), 2);
        let mut entered = entered;
        entered.goes(Gone::Time);
        drop(entered);
        assert!(second.over.is_cancelled() && second.why() == Gone::Time);
        let no = |said: Result<(), Opened>| matches!(said, Err(Opened::No { kind: Refused::NotHere, text }) if text.ends_with(Gone::Time.as_str()));
        assert!(no(shells.open(&open(1)).map(drop)) && no(shells.end(&name(1))));
        drop((first, second));
        assert_eq!(shells.count(), 0);
        let _entered = shells.enter(name(1), place(&guest));
        drop(guest);
        assert_eq!(kind(shells.open(&open(1))), Some(Refused::NotHere), "a machine whose agent is gone is none");
    }

    #[tokio::test]
    async fn whoever_waits_for_a_start_is_heard() {
        let (shells, guest) = (Shells::default(), guest().await);
        let _machine = shells.enter(name(1), place(&guest));
        let permit = shells.open(&open(1)).unwrap_or_else(|why| panic!("{why:?}"));
        let (hear, heard) = tokio::sync::mpsc::channel(session::FRAMES_MAX);
        let (say, _said) = tokio::sync::mpsc::channel(16);
        // Its agent answers nobody, so the command never begins.
        let running = tokio::spawn(session::run(permit, heard, say));
        let mut client = Link::new(End::Client, 0);
        for body in [Body::Alive, Body::Signal(2), Body::failed("the client has left".to_owned())] {
            hear.send(client.say(0, body)).await.unwrap();
        }
        // Long before the silence of a client that nobody listened to would have ended it.
        tokio::time::timeout(std::time::Duration::from_secs(10), running).await.unwrap().unwrap();
        assert_eq!(shells.count(), 0);
    }

    #[tokio::test]
    async fn there_are_so_many_and_no_more() {
        let (shells, guest) = (Shells::default(), guest().await);
        let machines: Vec<Entered> = (1..=9).map(|number| shells.enter(name(number), place(&guest))).collect();
        let mut held = Vec::new();
        for number in 1..=8 {
            held.extend((0..OF_ONE_MAX).map(|_| shells.open(&open(number)).unwrap_or_else(|no| panic!("{no:?}"))));
            if number < 8 {
                assert_eq!(kind(shells.open(&open(number))), Some(Refused::TooMany));
            }
        }
        assert_eq!(held.len(), OF_ALL_MAX);
        assert_eq!(kind(shells.open(&open(9))), Some(Refused::TooMany));
        held.pop();
        assert!(shells.open(&open(9)).is_ok());
        drop(machines);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for bad in [
            Open { argv: vec![String::new()], ..open(1) },
            Open { argv: vec!["a\0".into()], ..open(1) },
            Open { argv: vec!["a".repeat(COMMAND_BYTES_MAX + 1)], ..open(1) },
            Open { argv: vec!["a".into(); WORDS_MAX + 1], ..open(1) },
            Open { term: Some("x y".into()), ..open(1) },
        ] {
            assert_eq!(kind(Shells::default().open(&bad)), Some(Refused::BadRequest));
        }
    }
}
