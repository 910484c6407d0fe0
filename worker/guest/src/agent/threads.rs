//! Threads for what may block: calls, and the streams of commands.
//!
//! Owns how many wait for something to do. Starting a thread and ending one is most of what a short call costs, and in a machine that was
//! just restored everything is done for the first time; so some stand ready, in every snapshot too. Does not own what they do.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Threads that stand ready from the beginning: a call and a command with its three streams, and one that looks after it.
const READY: usize = 6;
/// Threads that wait at most; what is more ends when it has nothing to do.
const IDLE_MAX: usize = 8;

type Work = Box<dyn FnOnce() + Send>;

/// The threads. Cheap to clone.
#[derive(Clone, Default)]
pub struct Threads(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Default)]
struct State {
    work: VecDeque<Work>,
    idle: usize,
}

impl std::fmt::Debug for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Threads").finish_non_exhaustive()
    }
}

impl Shared {
    /// Each change is whole when a thread panics.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next piece of work; none when there are enough who wait for one.
    fn next(&self) -> Option<Work> {
        let mut state = self.lock();
        if state.work.is_empty() && state.idle >= IDLE_MAX {
            return None;
        }
        state.idle += 1;
        loop {
            if let Some(work) = state.work.pop_front() {
                state.idle -= 1;
                return Some(work);
            }
            state = self.more.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Threads {
    /// Some that are ready.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn start() -> io::Result<Self> {
        let threads = Self::default();
        for _ in 0..READY {
            threads.begin(Box::new(|| ()))?;
        }
        Ok(threads)
    }

    /// Does this at once, beside everything else.
    ///
    /// # Errors
    /// No thread could be started; it is not done.
    pub fn run(&self, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let mut state = self.0.lock();
        if state.idle > state.work.len() {
            state.work.push_back(Box::new(work));
            drop(state);
            self.0.more.notify_one();
            return Ok(());
        }
        drop(state);
        self.begin(Box::new(work))
    }

    fn begin(&self, first: Work) -> io::Result<()> {
        let shared = self.0.clone();
        super::thread("work", move || {
            let mut work = Some(first);
            while let Some(now) = work {
                now();
                work = shared.next();
            }
        })?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn everything_is_done_at_once_however_much_it_is() {
        let threads = Threads::start().unwrap();
        let (done, all) = mpsc::channel();
        for _ in 0..20 {
            // Nobody goes on before all are there.
            let gate = Arc::new(std::sync::Barrier::new(50));
            for number in 0..50 {
                let (gate, done) = (gate.clone(), done.clone());
                threads
                    .run(move || {
                        gate.wait();
                        done.send(number).unwrap();
                    })
                    .unwrap();
            }
            let mut came: Vec<u32> = (0..50).map(|_| all.recv_timeout(Duration::from_secs(20)).unwrap()).collect();
            came.sort_unstable();
            assert_eq!(came, (0..50).collect::<Vec<_>>());
        }
        let begin = std::time::Instant::now();
        while threads.0.lock().idle != IDLE_MAX {
            assert!(begin.elapsed() < Duration::from_secs(20), "{}", threads.0.lock().idle);
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(threads.0.lock().work.is_empty());
    }
}
