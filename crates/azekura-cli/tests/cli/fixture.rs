//! Runs the built program in a temporary directory.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// A directory in which the program runs; the temporary directory of the program is in it.
pub(crate) struct CliFixture {
    pub(crate) dir: TempDir,
}

/// Exit code and output of a run.
#[derive(Debug)]
pub(crate) struct CliResult {
    pub(crate) code: Option<i32>,
    pub(crate) out: Vec<u8>,
    pub(crate) err: String,
}

impl CliFixture {
    pub(crate) fn new() -> CliFixture {
        let fixture = CliFixture { dir: tempfile::tempdir().unwrap() };
        std::fs::create_dir(fixture.path("tmp")).unwrap();
        fixture
    }

    pub(crate) fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The files of a directory with this extension, by name.
    pub(crate) fn files(&self, dir: &str, extension: &str) -> Vec<PathBuf> {
        let paths = std::fs::read_dir(self.path(dir)).unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<_> = paths.filter(|path| path.extension().is_some_and(|e| e == extension)).collect();
        files.sort();
        files
    }

    pub(crate) fn command<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_azekura"));
        command.args(args).current_dir(self.dir.path()).env("TMPDIR", self.path("tmp"));
        command.env_remove("AZEKURA_DB");
        command
    }

    /// Runs the program with the words of a line as arguments.
    pub(crate) fn run(&self, line: &str) -> CliResult {
        self.run_args(line.split_whitespace())
    }

    pub(crate) fn run_args<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> CliResult {
        self.run_with_input(args, b"")
    }

    pub(crate) fn run_with_input<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>, input: &[u8]) -> CliResult {
        let piped = |command: &mut Command| {
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let mut child = piped(&mut self.command(args));
        // The write fails if the program has ended without reading its input.
        let _ = child.stdin.take().unwrap().write_all(input);
        let output = child.wait_with_output().unwrap();
        CliResult { code: output.status.code(), out: output.stdout, err: String::from_utf8(output.stderr).unwrap() }
    }

    /// Runs a line that must succeed, and returns its output.
    pub(crate) fn ok(&self, line: &str) -> String {
        let ran = self.run(line);
        assert_eq!(ran.code, Some(0), "{line}: {ran:?}");
        ran.text()
    }

    /// Runs a line with `--json` that must succeed and print one object.
    pub(crate) fn json(&self, line: &str) -> Value {
        let text = self.ok(&format!("{line} --json"));
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{line}: {e}: {text}"))
    }

    /// Checks that the temporary directory is empty.
    pub(crate) fn assert_cleaned_up(&self) {
        let names: Vec<_> = std::fs::read_dir(self.path("tmp")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert!(names.is_empty(), "temporary files remain: {names:?}");
    }
}

impl CliResult {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.out.clone()).unwrap()
    }

    /// The object under "error" on standard error.
    pub(crate) fn error(&self) -> Value {
        let mut object: Value = serde_json::from_str(&self.err).unwrap_or_else(|e| panic!("{e}: {self:?}"));
        object["error"].take()
    }
}
