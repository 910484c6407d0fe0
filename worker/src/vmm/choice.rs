//! Which VMM this host's machines run on.
//!
//! Owns the choice and its reason. What is asked for by name and can't be used is an error; nothing else is taken in its place. Does not own
//! what a VMM needs to be of use: its driver says that.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use super::firecracker::Firecracker;
use super::kvm::{self, Kvm};
use super::qemu::Qemu;
use super::spawner::MachineSpawner;
use super::{Kind, Vmm, VmmError};

/// The name of Firecracker's program, and where it is looked for behind PATH.
const FIRECRACKER: &str = "firecracker";
const FIRECRACKER_DIRS: [&str; 2] = ["/usr/local/bin", "/usr/bin"];

/// Which VMM is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Choice {
    /// Firecracker where KVM executes and there is one, else QEMU.
    #[default]
    Auto,
    /// QEMU, which emulates where KVM does not execute.
    Qemu,
    /// Firecracker, which has nothing but KVM.
    Firecracker,
}

impl Choice {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Qemu, Self::Firecracker];

    /// Its name in configurations.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Qemu => "qemu",
            Self::Firecracker => "firecracker",
        }
    }
}

/// A name of no choice.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no VMM {0:?}; auto, qemu and firecracker there are")]
pub struct NoChoice(pub String);

impl FromStr for Choice {
    type Err = NoChoice;

    fn from_str(name: &str) -> Result<Self, NoChoice> {
        Self::ALL.into_iter().find(|choice| choice.as_str() == name).ok_or_else(|| NoChoice(name.to_owned()))
    }
}

/// Where the VMMs lie, as far as that was said.
#[derive(Debug, Clone, Copy, Default)]
pub struct Programs<'a> {
    /// QEMU; where distributions put it when none is named.
    pub qemu: Option<&'a Path>,
    /// Firecracker; looked for when none is named.
    pub firecracker: Option<&'a Path>,
}

/// What was chosen.
#[derive(Debug)]
pub struct Chosen {
    /// The VMM.
    pub vmm: Arc<dyn Vmm>,
    /// Why it, in words.
    pub why: String,
    /// What was named and is not used, with the reason, in words.
    pub unused: Option<String>,
}

/// Why there is none.
#[derive(Debug, thiserror::Error)]
pub enum ChoiceError {
    /// The one that was asked for, or that was named, can't be used.
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// None can be used.
    #[error("{qemu}; Firecracker is not used either: {firecracker}")]
    None {
        /// Why not QEMU.
        qemu: VmmError,
        /// Why not Firecracker.
        firecracker: String,
    },
}

/// Chooses one and opens it.
///
/// # Errors
/// [`ChoiceError`], one line that says what is missing.
pub async fn open(choice: Choice, programs: &Programs<'_>, spawner: MachineSpawner) -> Result<Chosen, ChoiceError> {
    let kvm = kvm::probe(&spawner).await;
    match choice {
        Choice::Qemu => {
            let vmm = Arc::new(Qemu::open(spawner, programs.qemu, kvm).await?);
            let unused = unused("--firecracker", programs.firecracker, "--vmm qemu asks for QEMU");
            Ok(Chosen { vmm, why: format!("it was asked for, and {}", kvm.as_str()), unused })
        }
        Choice::Firecracker => {
            let vmm = Arc::new(Firecracker::open(spawner, &firecracker(programs.firecracker)?, kvm).await?);
            let unused = unused("--qemu", programs.qemu, "--vmm firecracker asks for Firecracker");
            Ok(Chosen { vmm, why: format!("it was asked for, and {}", kvm.as_str()), unused })
        }
        Choice::Auto => {
            let without = match by_kvm(kvm, programs.firecracker) {
                Ok(program) => match Firecracker::open(spawner.clone(), &program, kvm).await {
                    Ok(vmm) => {
                        let why = format!("{}, and {} is there", kvm.as_str(), program.display());
                        let unused = unused("--qemu", programs.qemu, "Firecracker is taken where KVM executes; --vmm qemu takes QEMU");
                        return Ok(Chosen { vmm: Arc::new(vmm), why, unused });
                    }
                    // It was named, so it is meant.
                    Err(why) if programs.firecracker.is_some() => return Err(why.into()),
                    Err(why) => why.to_string(),
                },
                Err(why) => why,
            };
            match Qemu::open(spawner, programs.qemu, kvm).await {
                Ok(vmm) => {
                    let why = format!("{}; --vmm firecracker takes it all the same, where it can run", kvm.as_str());
                    let unused = unused("--firecracker", programs.firecracker, &why);
                    Ok(Chosen { vmm: Arc::new(vmm), why: without, unused })
                }
                Err(qemu) => Err(ChoiceError::None { qemu, firecracker: without }),
            }
        }
    }
}

/// Says that a program is not used that was named.
fn unused(flag: &str, named: Option<&Path>, why: &str) -> Option<String> {
    named.map(|program| format!("{flag} {} is not used: {why}", program.display()))
}

/// The Firecracker to try, where nobody asked for one; or why none.
fn by_kvm(kvm: Kvm, named: Option<&Path>) -> Result<PathBuf, String> {
    match (kvm, named) {
        (Kvm::Usable, Some(named)) => Ok(named.to_owned()),
        (Kvm::Usable, None) => firecracker(None).map_err(|why| why.to_string()),
        (kvm, _) => Err(kvm.as_str().to_owned()),
    }
}

/// Where Firecracker lies.
fn firecracker(named: Option<&Path>) -> Result<PathBuf, VmmError> {
    match named {
        Some(named) => Ok(named.to_owned()),
        None => find(&std::env::var_os("PATH").unwrap_or_default()).ok_or_else(|| VmmError::Unusable {
            vmm: Kind::Firecracker,
            why: format!("it is neither in PATH nor in {}; install it, or name it with --firecracker", FIRECRACKER_DIRS.join(" or ")),
        }),
    }
}

/// The first in these directories, then in those where it is usually put.
fn find(path: &OsStr) -> Option<PathBuf> {
    // An empty part is the working directory, which is no place for programs of a service.
    let dirs = std::env::split_paths(path).filter(|dir| dir.is_absolute());
    dirs.chain(FIRECRACKER_DIRS.map(PathBuf::from)).map(|dir| dir.join(FIRECRACKER)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for choice in Choice::ALL {
            assert_eq!(choice.as_str().parse(), Ok(choice));
        }
        assert_eq!("QEMU".parse::<Choice>().unwrap_err().to_string(), r#"there is no VMM "QEMU"; auto, qemu and firecracker there are"#);
    }

    #[test]
    fn firecracker_is_tried_where_kvm_executes_and_there_is_one() {
        let named = Path::new("/opt/firecracker");
        assert_eq!(by_kvm(Kvm::Usable, Some(named)), Ok(named.to_owned()));
        for kvm in [Kvm::Emulates, Kvm::Missing, Kvm::Forbidden, Kvm::Broken] {
            assert_eq!(by_kvm(kvm, Some(named)), Err(kvm.as_str().to_owned()));
        }
    }

    #[test]
    fn what_is_named_and_not_used_is_said() {
        assert_eq!(unused("--qemu", None, "no"), None);
        let said = unused("--firecracker", Some(Path::new("/opt/fc")), "there is no KVM").unwrap();
        assert_eq!(said, "--firecracker /opt/fc is not used: there is no KVM");
    }

    #[test]
    fn it_is_looked_for_in_path_and_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let (empty, full) = (dir.path().join("empty"), dir.path().join("full"));
        for dir in [&empty, &full] {
            std::fs::create_dir(dir).unwrap();
        }
        // A directory of that name is none.
        std::fs::create_dir(empty.join(FIRECRACKER)).unwrap();
        std::fs::write(full.join(FIRECRACKER), "").unwrap();
        let path = std::env::join_paths([&empty, &full]).unwrap();
        assert_eq!(find(&path), Some(full.join(FIRECRACKER)));
        assert!(find(OsStr::new(":relative")).is_none_or(|found| found.starts_with("/usr")));
    }
}
