//! Tells the module which commit it is built from; from an archive without git, none.

use std::process::Command;

fn main() {
    let git = Command::new("git").args(["describe", "--always", "--dirty", "--abbrev=9"]).output();
    let commit = git.ok().filter(|done| done.status.success());
    let commit = commit.map(|done| String::from_utf8_lossy(&done.stdout).trim().to_owned());
    println!("cargo:rustc-env=KIE_COMMIT={}", commit.as_deref().unwrap_or("no commit known"));
}
