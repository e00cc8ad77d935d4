//! Man pages and shell completions.

use std::process::Command;

use crate::fixture::CliFixture;

#[test]
fn every_command_has_a_man_page() {
    let p = CliFixture::new();
    p.ok("generate man --dir pages");
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
    p.ok("generate completions --dir files");
    for name in ["azekura.bash", "_azekura", "azekura.fish", "azekura.elv", "_azekura.ps1"] {
        assert!(std::fs::read_to_string(p.path("files").join(name)).unwrap().contains("checkpoint"), "{name}");
    }
    if let Ok(checked) = Command::new("bash").arg("-n").arg(p.path("files/azekura.bash")).output() {
        assert!(checked.status.success(), "{checked:?}");
    }
}

#[test]
fn standard_output_gets_one_file() {
    let p = CliFixture::new();
    p.ok("generate man --dir files");
    p.ok("generate completions --dir files");
    let file = |name: &str| std::fs::read_to_string(p.path("files").join(name)).unwrap();
    assert_eq!(p.ok("generate completions fish"), file("azekura.fish"));
    assert_eq!(p.ok("generate man"), file("azekura.1"));
    assert_eq!(p.ok("generate man partitions create"), file("azekura-partitions-create.1"));
    for bad in ["generate completions", "generate completions csh", "generate man fly"] {
        assert_eq!(p.run(bad).code, Some(2), "{bad}");
    }
}

/// The completions contained hidden commands and options, and `exit-codes` printed all codes in one paragraph.
#[test]
fn hidden_commands_stay_hidden() {
    let p = CliFixture::new();
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let text = p.ok(&format!("generate completions {shell}"));
        assert!(text.contains("checkpoint") && !text.contains("demo-writer") && !text.contains("memtable-bytes"));
    }
    assert!(!p.ok("generate man").contains("demo\\-writer"));
    let codes = p.ok("generate man exit-codes");
    assert!(codes.contains(".TP\n\\fB130\\fR\ninterrupted (Ctrl\\-C)\n") && !codes.contains(".SH OPTIONS"), "{codes}");
}
