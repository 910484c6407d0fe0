//! Links the agent statically, and it alone, in any ordinary build.
//!
//! rustc has a switch for it (`crt-static`), but cargo can only give it to every crate at once or in a build of its own. What the switch
//! changes is how the last step is linked; so that is said here, to the linker, for the one binary: `-static-pie`, and for each library
//! of C that Rust's standard library names, a linker script that names the archive instead.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The libraries that are linked to, and the archives that stand for them. glibc's own `libc.so` is a script of this kind too.
const SCRIPTS: [(&str, &str); 7] = [
    ("gcc_s", "libgcc_eh.a libgcc.a libc.a"),
    ("c", "libc.a libgcc_eh.a libgcc.a"),
    ("m", "libm.a libc.a"),
    ("dl", "libdl.a libc.a"),
    ("rt", "librt.a libc.a"),
    ("pthread", "libpthread.a libc.a"),
    ("util", "libutil.a libc.a"),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS")? != "linux" || std::env::var("CARGO_CFG_TARGET_ENV")? != "gnu" {
        // musl is static anyway.
        return Ok(());
    }
    if !["libc.a", "rcrt1.o"].iter().all(|name| is_there(name)) {
        println!("cargo:warning=no static C library here (Debian: libc6-dev, Fedora: glibc-static): volley-guest can't run in machines");
        return Ok(());
    }
    let dir = PathBuf::from(std::env::var("OUT_DIR")?).join("static");
    std::fs::create_dir_all(&dir)?;
    for (library, archives) in SCRIPTS {
        std::fs::write(dir.join(format!("lib{library}.so")), format!("GROUP ( {archives} )\n"))?;
    }
    // Directories that are named are searched before the system's. Symbols would double its size, and nobody debugs it in a machine.
    println!("cargo:rustc-link-arg-bins=-static-pie");
    println!("cargo:rustc-link-arg-bins=-L{}", dir.display());
    println!("cargo:rustc-link-arg-bins=-Wl,-s");
    Ok(())
}

/// Does the C compiler know this file?
fn is_there(name: &str) -> bool {
    let compilers = ["clang", "cc", "gcc"];
    compilers.iter().any(|compiler| {
        let asked = Command::new(compiler).arg(format!("-print-file-name={name}")).output();
        asked.is_ok_and(|output| Path::new(String::from_utf8_lossy(&output.stdout).trim()).is_absolute())
    })
}
