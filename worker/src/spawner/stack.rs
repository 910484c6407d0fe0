//! Starting a child that borrows its parent's memory until it execs, so that nothing is copied however large the parent is.
//!
//! The parent sleeps until then, as after a vfork. Without that the two run at once and share the C library's `errno`: a command was told
//! not to be executable for an error that was its shim's.
//!
//! Owns the clone and the memory that the child runs on. Does not own what the child does (`child`, and that of `vmm/spawner`).

use std::ffi::{c_int, c_void};

/// Stack of a child until it execs, in bytes; its frames are a few hundred.
const STACK_BYTES: usize = 64 * 1024;

/// Memory that children run on, kept from one start to the next.
pub struct Stack(Vec<u128>);

impl Stack {
    /// Takes the memory.
    pub fn new() -> Self {
        Self(vec![0; STACK_BYTES / size_of::<u128>()])
    }

    /// Runs `child` with `plan` in a new process. This one sleeps until that execs or exits.
    /// Gives its process id; it has not been waited for. `failed` is what the child left in the plan when it did not exec, `not_cloned` what the system's error number means.
    ///
    /// # Errors
    /// What `failed` or `not_cloned` says.
    ///
    /// # Safety
    /// `child` takes a pointer to a `T`, and does what may be done in memory that belongs to a process that sleeps: it allocates nothing,
    /// takes no lock, returns into no frame of its parent, and ends with an exec or `_exit`.
    pub unsafe fn start<T, F>(
        &mut self,
        child: extern "C" fn(*mut c_void) -> c_int,
        plan: &mut T,
        failed: impl FnOnce(&mut T) -> Option<F>,
        not_cloned: impl FnOnce(i32) -> F,
    ) -> Result<libc::pid_t, F> {
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        // Stacks grow downwards.
        let top = self.0.as_mut_ptr_range().end.cast();
        // SAFETY: stack and plan outlive the child's use of them because VFORK suspends us until it execs or exits; for the child the caller
        // has answered.
        let pid = unsafe { libc::clone(child, top, flags, (&raw mut *plan).cast()) };
        if pid < 0 {
            return Err(not_cloned(last_errno()));
        }
        match failed(plan) {
            None => Ok(pid),
            Some(why) => {
                // SAFETY: plain system call; the child has exited, this only takes its status.
                unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
                Err(why)
            }
        }
    }
}

fn last_errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}
