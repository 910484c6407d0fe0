//! The host's processor, as far as a snapshot depends on it.
//!
//! Owns which words of the system make two processors the same. Where the guest's instructions are run by the processor, a guest has found
//! out at its boot what that one can do: restored on another one it uses what is not there.

use std::io;

use super::Accelerator;

/// Where Linux says what processors there are (proc(5)).
pub const CPUINFO: &str = "/proc/cpuinfo";
/// Words that count, in this order: maker, which one, what it can do.
const WORDS: [&str; 5] = ["vendor_id", "cpu family", "model", "stepping", "flags"];

/// The host's processor, for the name of a template; empty where machines are emulated and don't depend on it.
///
/// # Errors
/// What the system says.
pub fn of_host(accelerator: Accelerator) -> io::Result<String> {
    match accelerator {
        Accelerator::Tcg => Ok(String::new()),
        Accelerator::Kvm | Accelerator::EmulatingKvm => std::fs::read_to_string(CPUINFO).map(|text| fingerprint(&text)),
    }
}

/// Maker, family, model and stepping of the first processor in clear, and a hash of its features.
#[must_use]
pub fn fingerprint(cpuinfo: &str) -> String {
    let first = cpuinfo.split("\n\n").next().unwrap_or_default();
    let value = |word: &str| {
        let lines = first.lines().filter_map(|line| line.split_once(':'));
        lines.into_iter().find(|(name, _)| name.trim() == word).map_or("?", |(_, value)| value.trim()).to_owned()
    };
    let [vendor, family, model, stepping, flags] = WORDS.map(value);
    let mut flags: Vec<&str> = flags.split_whitespace().collect();
    flags.sort_unstable();
    let hash = blake3::hash(flags.join(" ").as_bytes()).to_hex();
    format!("{vendor} {family}/{model}/{stepping} features {}", hash.get(..16).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_that_can_do_other_things_are_others() {
        let text = |model: &str, flags: &str| {
            format!(
                "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: {model}\nmodel name\t: X\nstepping\t: 8\ncpu MHz\t\t: 2100.1\nflags\t\t: {flags}\n\nprocessor\t: 1\n"
            )
        };
        let one = fingerprint(&text("143", "fpu vme"));
        assert!(one.starts_with("GenuineIntel 6/143/8 features "), "{one}");
        assert_eq!(one, fingerprint(&text("143", "vme fpu").replace("2100.1", "800.0")));
        assert_ne!(one, fingerprint(&text("143", "fpu vme avx512f")));
        assert_ne!(one, fingerprint(&text("85", "fpu vme")));
        assert!(fingerprint("").starts_with("? ?/?/? "));
        assert_eq!(of_host(Accelerator::Tcg).unwrap(), "");
    }
}
