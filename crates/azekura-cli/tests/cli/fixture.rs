//! Runs the built program in a temporary directory.

use std::ffi::OsStr;
use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// A directory in which the program runs; the temporary directory of the program is in it.
pub(crate) struct CliFixture {
    pub(crate) dir: TempDir,
    /// The user id of the program, unless it is that of this process.
    other_user: Option<u32>,
}

/// The user id that most systems give to a user without files.
const OTHER_USER: u32 = 65_534;

/// Exit code and output of a run.
#[derive(Debug)]
pub(crate) struct CliResult {
    pub(crate) code: Option<i32>,
    pub(crate) out: Vec<u8>,
    pub(crate) err: String,
}

impl CliFixture {
    pub(crate) fn new() -> CliFixture {
        CliFixture::in_dir(tempfile::tempdir().unwrap())
    }

    pub(crate) fn in_dir(dir: TempDir) -> CliFixture {
        let fixture = CliFixture { dir, other_user: None };
        std::fs::create_dir(fixture.path("tmp")).unwrap();
        fixture
    }

    /// Runs the program as another user from now on. Returns false if this process may not do that, which only the
    /// superuser may.
    pub(crate) fn become_other_user(&mut self) -> bool {
        // The other user may have no access to the directory of the program that was built.
        std::fs::copy(env!("CARGO_BIN_EXE_azekura"), self.path("azekura")).unwrap();
        for (name, mode) in [("", 0o755), ("azekura", 0o755), ("tmp", 0o777)] {
            std::fs::set_permissions(self.path(name), Permissions::from_mode(mode)).unwrap();
        }
        self.other_user = Some(OTHER_USER);
        let runs = self.command(["--version"]).output().is_ok_and(|output| output.status.success());
        self.other_user.take_if(|_| !runs);
        runs
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
        let program = self.other_user.map_or(env!("CARGO_BIN_EXE_azekura").into(), |_| self.path("azekura"));
        let mut command = Command::new(program);
        if let Some(user) = self.other_user {
            command.uid(user).gid(user);
        }
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
