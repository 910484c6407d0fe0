//! Source is as rustfmt writes it.

use std::process::{Command, Stdio};

use crate::none;
use crate::source::root;

#[test]
fn source_is_formatted() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let has = Command::new(&cargo).args(["fmt", "--version"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !has.is_ok_and(|status| status.success()) {
        println!("skipped: no rustfmt here; `rustup component add rustfmt` installs it");
        return;
    }
    let output = Command::new(cargo).args(["fmt", "--all", "--", "--check", "--files-with-diff"]).current_dir(root()).output().unwrap();
    let listed = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    let broken = if output.status.success() { Vec::new() } else { listed.lines().map(str::to_owned).collect() };
    none("`cargo fmt --all` was run", broken);
}
