//! Man pages and shell completions.

use std::process::Command;

use crate::fixture::CliFixture;

#[test]
fn every_command_has_a_man_page() {
    let p = CliFixture::new();
    p.ok("generate man pages");
    for (page, text) in
        [("azekura.1", "azekura-put(1)"), ("azekura-put.1", "standard input"), ("azekura-gc-run.1", "--space-amp")]
    {
        // Where `man` is missing, the test checks the source of the page, in which roff escapes each hyphen.
        let shown = Command::new("man").arg("-l").arg(p.path("pages").join(page)).env("MANWIDTH", "200").output();
        let shown = match shown {
            Ok(shown) => {
                assert!(shown.status.success(), "{page}: {shown:?}");
                String::from_utf8(shown.stdout).unwrap()
            }
            Err(_) => std::fs::read_to_string(p.path("pages").join(page)).unwrap().replace("\\-", "-"),
        };
        assert!(shown.contains(text), "{page}: {shown}");
    }
}

#[test]
fn completions_are_valid_shell_code() {
    let p = CliFixture::new();
    p.ok("generate completions files");
    for name in ["azekura.bash", "_azekura", "azekura.fish", "azekura.elv", "_azekura.ps1"] {
        assert!(std::fs::read_to_string(p.path("files").join(name)).unwrap().contains("checkpoint"), "{name}");
    }
    if let Ok(checked) = Command::new("bash").arg("-n").arg(p.path("files/azekura.bash")).output() {
        assert!(checked.status.success(), "{checked:?}");
    }
}
