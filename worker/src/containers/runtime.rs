//! The program that runs containers: one of those that follow the OCI runtime specification.
//!
//! Owns finding it, what it says it is, and in what words it is asked. Does not own what it is asked to run.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::ContainersError;

/// What is looked for when nothing is named: the one with the least of a start (C, without a runtime of its own language).
const DEFAULT: &str = "crun";

/// Which one it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// <https://github.com/containers/crun>.
    Crun,
    /// <https://github.com/opencontainers/runc>.
    Runc,
    /// gVisor's <https://gvisor.dev>: a kernel of its own in user space. It hands no descriptors over.
    Runsc,
}

/// A runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runtime {
    /// Its program.
    pub path: PathBuf,
    /// Which one.
    pub kind: Kind,
    /// What it calls itself, with its version.
    pub name: String,
}

impl Runtime {
    /// Finds the one that is named, by its path or its name, or else the default; and asks what it is.
    ///
    /// # Errors
    /// [`ContainersError::NoRuntime`], [`ContainersError::Unknown`].
    pub fn find(wanted: Option<&Path>) -> Result<Self, ContainersError> {
        let wanted = wanted.unwrap_or(Path::new(DEFAULT));
        let missing = || ContainersError::NoRuntime { wanted: wanted.display().to_string() };
        let path = if wanted.components().count() > 1 {
            Some(wanted.to_owned()).filter(|path| path.is_file())
        } else {
            // Where administrators' programs are, which a service's PATH may lack.
            let listed = std::env::var_os("PATH").unwrap_or_default();
            let dirs = std::env::split_paths(&listed).chain(["/usr/sbin", "/usr/bin", "/sbin"].map(PathBuf::from));
            dirs.map(|dir| dir.join(wanted)).find(|path| path.is_file())
        };
        let path = path.ok_or_else(missing)?;
        let said = Command::new(&path).arg("--version").stdin(Stdio::null()).output();
        let said = match said {
            Ok(output) => String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned(),
            Err(e) => return Err(ContainersError::Unknown { path, said: e.to_string() }),
        };
        match kind(&said) {
            Some(kind) => Ok(Self { path, kind, name: said.replacen(" version", "", 1) }),
            None => Err(ContainersError::Unknown { path, said }),
        }
    }

    /// Does it hand descriptors over to what it runs?
    #[must_use]
    pub fn hands_over(&self) -> bool {
        self.kind != Kind::Runsc
    }

    /// The command that runs the container `id` of the bundle in `bundle`, its state in `state`, with `descriptors` handed over.
    #[must_use]
    pub fn command(&self, bundle: &str, state: &str, id: &str, descriptors: usize) -> Vec<String> {
        let before: &[&str] = match self.kind {
            // What runs enters its cgroups itself, behind all that the runtime needs for its own part.
            Kind::Crun => &["--cgroup-manager=disabled"],
            Kind::Runc => &[],
            // Works on every host; the others want a newer release or a processor's help.
            Kind::Runsc => &["--platform=ptrace", "--network=none", "--ignore-cgroups"],
        };
        let mut words = vec![self.path.to_string_lossy().into_owned()];
        words.extend(before.iter().map(|word| (*word).to_owned()));
        words.extend(["--root", state, "run", "--bundle", bundle].map(str::to_owned));
        if self.hands_over() {
            words.extend(["--preserve-fds".to_owned(), descriptors.to_string()]);
        }
        words.push(id.to_owned());
        words
    }
}

fn kind(said: &str) -> Option<Kind> {
    match said.split_whitespace().next()? {
        "crun" => Some(Kind::Crun),
        "runc" => Some(Kind::Runc),
        "runsc" => Some(Kind::Runsc),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_or_something_else_is_said() {
        let said = |wanted: &str| Runtime::find(Some(Path::new(wanted))).expect_err("none").to_string();
        assert!(said("no-such-runtime").starts_with("no no-such-runtime in PATH"));
        assert!(said("/no/such/runtime").contains("/no/such/runtime"));
        assert!(said("true").contains("does not say that it is crun, runc or runsc"));
    }

    #[test]
    fn each_is_asked_in_its_words() {
        let ask = |kind| {
            let runtime = Runtime { path: "/bin/r".into(), kind, name: String::new() };
            runtime.command("/b", "/s", "c1", 5).join(" ")
        };
        assert_eq!(ask(Kind::Crun), "/bin/r --cgroup-manager=disabled --root /s run --bundle /b --preserve-fds 5 c1");
        assert_eq!(ask(Kind::Runc), "/bin/r --root /s run --bundle /b --preserve-fds 5 c1");
        assert!(!ask(Kind::Runsc).contains("preserve-fds"));
    }
}
