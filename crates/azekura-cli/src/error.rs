//! Errors of commands, their messages and their exit codes.

use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use azekura::fs::{LockHolder, lock_holders};
use azekura::{Error, ErrorKind};
use serde_json::{Value, json};

/// A result whose error ends the command.
pub(crate) type Result<T, E = CliError> = std::result::Result<T, E>;

/// Outcome of a command that ran to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommandOutcome {
    Success,
    /// Not found, damaged, or only partly done.
    Negative,
}

impl CommandOutcome {
    pub(crate) fn success_if(condition: bool) -> CommandOutcome {
        if condition { CommandOutcome::Success } else { CommandOutcome::Negative }
    }

    pub(crate) fn exit_code(self) -> ExitCode {
        match self {
            CommandOutcome::Success => ExitCode::SUCCESS,
            CommandOutcome::Negative => ExitCode::from(1),
        }
    }
}

/// Kind of the error of a full pool.
const POOL_FULL: &str = "pool_full";

/// Reason why a command did not run to its end. `azekura help exit-codes` documents the exit codes.
#[derive(Debug)]
pub(crate) struct CliError {
    code: u8,
    kind: Box<str>,
    message: Box<str>,
    file: Option<PathBuf>,
    offset: Option<u64>,
    /// The processes that have the database open, if it is locked and the operating system lists them.
    holders: Box<[LockHolder]>,
    /// The error as text; with the file, and from the engine with the kind and the offset.
    text: Box<str>,
}

impl CliError {
    fn new(code: u8, kind: &str, message: String, file: Option<&Path>) -> CliError {
        let text = file.map_or(message.clone(), |file| format!("{message} ({})", file.display()));
        CliError {
            code,
            kind: kind.into(),
            message: message.into(),
            file: file.map(Path::to_path_buf),
            offset: None,
            holders: Box::default(),
            text: text.into(),
        }
    }

    /// Arguments that contradict each other or cannot be parsed.
    pub(crate) fn usage(message: impl Into<String>) -> CliError {
        CliError::new(2, "usage", message.into(), None)
    }

    /// Wrong content or type of `file`.
    pub(crate) fn input(file: impl AsRef<Path>, message: impl Into<String>) -> CliError {
        CliError::new(3, "input", message.into(), Some(file.as_ref()))
    }

    /// This program has no importer for databases of the engine `name`.
    pub(crate) fn without_importer(name: &str) -> CliError {
        let message = format!(
            "this azekura was built without the importer for {name}; build it with `cargo install azekura-cli \
             --features import-{name}`"
        );
        CliError::new(3, "unsupported", message, None)
    }

    /// The error at byte `offset` of its file.
    pub(crate) fn at_offset(self, offset: u64) -> CliError {
        CliError { offset: Some(offset), ..self }
    }

    /// Damage for which `message` says what follows from it. The file and the offset are those of `error`.
    pub(crate) fn damaged(error: &Error, message: String) -> CliError {
        let code = if error.kind() == ErrorKind::Corruption { 5 } else { 3 };
        CliError { offset: error.offset(), ..CliError::new(code, &kind_word(error.kind()), message, error.file()) }
    }

    /// An operating-system error of `action` (a verb phrase) on `file`.
    pub(crate) fn os(action: &str, file: impl AsRef<Path>, source: io::Error) -> CliError {
        CliError::new(3, "io", format!("cannot {action}: {source}"), Some(file.as_ref()))
    }

    /// Another program has the source of an import open.
    #[cfg(any(feature = "_peer-copy", feature = "_peer-library", feature = "import-redb"))]
    pub(crate) fn source_in_use(file: impl AsRef<Path>) -> CliError {
        CliError::new(4, "locked", "another program has this database open; stop it first".into(), Some(file.as_ref()))
    }

    /// A library that an importer loads at run time is missing or unusable.
    #[cfg(feature = "_peer-library")]
    pub(crate) fn library_missing(message: String) -> CliError {
        CliError::new(3, "unsupported", message, None)
    }

    /// The error that another process of this program reported as JSON with this exit code.
    #[cfg(feature = "import-lmdb")]
    pub(crate) fn of_process(code: u8, error: &Value) -> CliError {
        let text = |field: &str| error[field].as_str().unwrap_or_default().to_string();
        CliError::new(code, &text("kind"), text("message"), error["file"].as_str().map(Path::new))
    }

    /// An error of a store of backups. Damaged objects give the exit code of damaged databases.
    #[cfg(feature = "backup")]
    pub(crate) fn backup(kind: &str, message: String) -> CliError {
        let is_damage = matches!(kind, "corruption" | "missing_object" | "gap");
        CliError::new(if is_damage { 5 } else { 3 }, kind, message, None)
    }

    /// The pool of a partition has no space for another entry.
    pub(crate) fn pool_full(partition: &str, error: &Error) -> CliError {
        let message = format!("the pool of partition \"{partition}\" is full: {}", error.message());
        CliError::new(3, POOL_FULL, message, None)
    }

    /// Whether this is the error of a full pool.
    pub(crate) fn is_pool_full(&self) -> bool {
        *self.kind == *POOL_FULL
    }

    /// Failure of the writer process of the demo.
    pub(crate) fn writer(code: u8, message: String) -> CliError {
        CliError::new(code, "writer", message, None)
    }

    /// The command ran, and did not find what it was asked for.
    pub(crate) fn negative(message: impl Into<String>) -> CliError {
        CliError::new(1, "not_found", message.into(), None)
    }

    /// A commit was refused. If a key has another value than is expected, the result is negative.
    pub(crate) fn refused(error: Error) -> CliError {
        let Some((partition, key)) = error.conflicting_key() else { return error.into() };
        let key = key.escape_ascii();
        let message = format!("key \"{key}\" of partition \"{partition}\" does not have the expected value");
        CliError::new(1, &kind_word(error.kind()), message, None)
    }

    /// Standard output is a closed pipe. Exits with 0 and without a message.
    pub(crate) fn pipe_closed() -> CliError {
        CliError::new(0, "pipe_closed", String::new(), None)
    }

    /// The user pressed Ctrl-C.
    pub(crate) fn interrupted() -> CliError {
        CliError::new(130, "interrupted", "interrupted".into(), None)
    }

    /// The exit code.
    pub(crate) fn code(&self) -> u8 {
        self.code
    }

    /// Whether standard output is a closed pipe.
    pub(crate) fn is_pipe_closed(&self) -> bool {
        self.code == CliError::pipe_closed().code
    }

    /// The error with another clause.
    pub(crate) fn with_note(mut self, note: &str) -> CliError {
        self.message = format!("{}; {note}", self.message).into();
        self.text = format!("{}; {note}", self.text).into();
        self
    }

    /// The error of a line of a script. Its exit code is 1; a closed pipe and an interruption keep theirs.
    pub(crate) fn in_line(mut self, number: u64) -> CliError {
        if self.is_pipe_closed() || self.code == CliError::interrupted().code {
            return self;
        }
        self.code = 1;
        self.message = format!("line {number}: {}", self.message).into();
        self.text = format!("line {number}: {}", self.text).into();
        self
    }

    /// Whether another handle has the database open.
    pub(crate) fn is_locked(&self) -> bool {
        *self.kind == *kind_word(ErrorKind::Locked)
    }

    /// The error as a JSON object. "holders" is present if the database is locked.
    fn to_json(&self) -> Value {
        let mut object = error_json(&self.kind, &self.message, self.file.as_deref(), self.offset);
        if self.is_locked() {
            object["holders"] = self.holders.iter().map(holder_json).collect();
        }
        object
    }

    /// Prints the error on standard error and returns the exit code.
    pub(crate) fn report(&self, json: bool) -> ExitCode {
        if json && self.code != 0 {
            print_error(json!({ "error": self.to_json() }));
        } else if self.code != 0 {
            print_error(format_args!("azekura: {self}"));
        }
        ExitCode::from(self.code)
    }
}

impl From<Error> for CliError {
    fn from(error: Error) -> CliError {
        let code = match error.kind() {
            ErrorKind::Locked => 4,
            ErrorKind::Corruption => 5,
            _ => 3,
        };
        let locked = error.file().filter(|_| error.kind() == ErrorKind::Locked);
        CliError {
            offset: error.offset(),
            text: error.to_string().into(),
            holders: locked.map_or_else(Vec::new, lock_holders).into(),
            ..CliError::new(code, &kind_word(error.kind()), error.message().to_owned(), error.file())
        }
    }
}

/// The error as a sentence.
impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = if self.text.ends_with(['.', '!', '?']) { "" } else { "." };
        write!(f, "{}{end}", self.text)
    }
}

/// Writes one line to standard error. Ignores a closed pipe, on which `eprintln!` panics; the exit code reports the
/// same error.
pub(crate) fn print_error(line: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Writes what the caller should know and is no error to standard error: one line of text, or with `json` an object
/// under "notice".
pub(crate) fn print_notice(json: bool, notice: Value, text: impl fmt::Display) {
    if json { print_error(json!({ "notice": notice })) } else { print_error(text) }
}

fn error_json(kind: &str, message: &str, file: Option<&Path>, offset: Option<u64>) -> Value {
    json!({ "kind": kind, "message": message, "file": file.map(|f| f.to_string_lossy()), "offset": offset })
}

fn holder_json(holder: &LockHolder) -> Value {
    json!({ "pid": holder.pid, "name": holder.name, "mode": if holder.is_writer { "write" } else { "read" } })
}

/// An error of the engine as a JSON object.
pub(crate) fn engine_error_json(error: &Error) -> Value {
    error_json(&kind_word(error.kind()), error.message(), error.file(), error.offset())
}

fn kind_word(kind: ErrorKind) -> String {
    match kind {
        ErrorKind::Io => "io".into(),
        other => other.to_string().replace(' ', "_"),
    }
}

/// Prints clap's message (help and version included) and returns the exit code.
pub(crate) fn report_usage(error: &clap::Error) -> ExitCode {
    if error.use_stderr() && std::env::args_os().any(|arg| arg == "--json") {
        return CliError::usage(usage_message(error)).report(true);
    }
    // A closed pipe does not change the exit code.
    let _ = error.print();
    ExitCode::from(if error.use_stderr() { 2 } else { 0 })
}

/// What is wrong with a command line, as one line. clap's text ends with the usage and a hint, after an empty line.
pub(crate) fn usage_message(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text.trim_start_matches("error: ").lines().map(str::trim).take_while(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_messages_and_exit_codes() {
        let locked = CliError::from(Error::new(ErrorKind::Locked, "another program has it open").in_file("/db/LOCK"));
        assert_eq!(locked.to_string(), "locked: another program has it open (/db/LOCK).");
        assert_eq!(locked.code, 4);
        assert_eq!(CliError::from(Error::corruption("x")).code, 5);
        let os = CliError::os("read the value", "/nope", io::Error::from(io::ErrorKind::PermissionDenied));
        assert_eq!((os.to_string().as_str(), os.code), ("cannot read the value: permission denied (/nope).", 3));
    }

    #[test]
    fn kinds_are_single_words() {
        assert_eq!(kind_word(ErrorKind::OutOfSpace), "out_of_space");
        assert_eq!(kind_word(ErrorKind::Io), "io");
    }
}
