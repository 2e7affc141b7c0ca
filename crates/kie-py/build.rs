//! Tells the module which commit it is built from; from an archive without git, none.

use std::path::Path;
use std::process::Command;

fn git(args: &[&str]) -> Option<String> {
    let done = Command::new("git").args(args).output().ok().filter(|done| done.status.success())?;
    Some(String::from_utf8_lossy(&done.stdout).trim().to_owned())
}

fn main() {
    // Else it is asked again only where a file of this crate has changed. A file that is not there
    // counts as changed each time.
    let moves = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|at| Path::new(at).exists());
    for path in moves.iter().map(String::as_str).chain(["build.rs", "src"]) {
        println!("cargo:rerun-if-changed={path}");
    }
    let commit = git(&["describe", "--always", "--dirty", "--abbrev=9"]);
    println!("cargo:rustc-env=KIE_COMMIT={}", commit.as_deref().unwrap_or("no commit known"));
}
