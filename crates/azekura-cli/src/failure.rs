//! What can go wrong, how it is told, and the exit code it gives.

use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use azekura::{Error, ErrorKind};
use serde_json::json;

/// The text of `azekura help exit-codes`; [`Failure::code`] and [`Answer::exit_code`] do what it says.
pub(crate) const EXIT_CODES: &str = "\
Explain the exit codes.

    0  done; the answer is yes
    1  done, and the answer is no: the key does not exist, `verify` found damage, a check of
       `demo` did not hold, or some entries of an import or export had to be left out
    2  the command line is wrong
    3  an error of the operating system or of the database
    4  the database is locked: another program has it open
    5  the database is damaged: bytes on disk are not what was written
  130  interrupted (Ctrl-C)

Errors are sentences on standard error. With --json they are one object there:
    {\"error\": {\"kind\": \"locked\", \"message\": \"…\", \"file\": \"…\", \"offset\": null}}";

/// A result whose error ends the command.
pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

/// How a command that ran to its end answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Done, or yes.
    Yes,
    /// Not found, not sound, not all.
    No,
}

impl Answer {
    pub(crate) fn yes_if(condition: bool) -> Answer {
        if condition { Answer::Yes } else { Answer::No }
    }

    pub(crate) fn exit_code(self) -> ExitCode {
        match self {
            Answer::Yes => ExitCode::SUCCESS,
            Answer::No => ExitCode::from(1),
        }
    }
}

/// Why a command could not run to its end.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The arguments contradict each other or cannot be read.
    Usage(String),
    /// The input is not what it should be.
    Input { file: PathBuf, message: String },
    /// The operating system refused something.
    Os { what: String, file: PathBuf, source: io::Error },
    /// The database refused something.
    Engine(Error),
    /// A child process failed and said why.
    Child { code: u8, kind: String, message: String },
    /// Whoever read our output has left: nothing to complain about.
    PipeClosed,
    /// Ctrl-C.
    Interrupted,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Engine(error)
    }
}

impl Failure {
    /// An operating-system error while doing `what` (a verb phrase) to `file`.
    pub(crate) fn os(what: impl Into<String>, file: impl AsRef<Path>, source: io::Error) -> Failure {
        Failure::Os { what: what.into(), file: file.as_ref().to_path_buf(), source }
    }

    pub(crate) fn code(&self) -> u8 {
        match self {
            Failure::Usage(_) => 2,
            Failure::Input { .. } | Failure::Os { .. } => 3,
            Failure::Engine(error) => match error.kind() {
                ErrorKind::Locked => 4,
                ErrorKind::Corruption => 5,
                _ => 3,
            },
            Failure::Child { code, .. } => *code,
            Failure::PipeClosed => 0,
            Failure::Interrupted => 130,
        }
    }

    /// The word for `kind` in JSON.
    pub(crate) fn kind(&self) -> String {
        match self {
            Failure::Usage(_) => "usage".into(),
            Failure::Input { .. } => "input".into(),
            Failure::Os { .. } => "io".into(),
            Failure::Engine(error) => kind_word(error.kind()),
            Failure::Child { kind, .. } => kind.clone(),
            Failure::PipeClosed => "pipe_closed".into(),
            Failure::Interrupted => "interrupted".into(),
        }
    }

    fn file(&self) -> Option<&Path> {
        match self {
            Failure::Input { file, .. } | Failure::Os { file, .. } => Some(file),
            Failure::Engine(error) => error.file(),
            _ => None,
        }
    }

    fn message(&self) -> String {
        match self {
            Failure::Usage(message) | Failure::Input { message, .. } | Failure::Child { message, .. } => {
                message.clone()
            }
            Failure::Os { what, source, .. } => format!("cannot {what}: {source}"),
            Failure::Engine(error) => error.message().to_string(),
            Failure::PipeClosed => "the reader of our output has left".into(),
            Failure::Interrupted => "interrupted".into(),
        }
    }

    /// Tells the user and gives the exit code.
    pub(crate) fn report(&self, json: bool) -> ExitCode {
        if !matches!(self, Failure::PipeClosed) {
            if json {
                let offset = if let Failure::Engine(error) = self { error.offset() } else { None };
                complain(error_object(&self.kind(), &self.message(), self.file(), offset));
            } else {
                complain(format_args!("azekura: {self}"));
            }
        }
        ExitCode::from(self.code())
    }
}

/// The sentence, with the file and the offset where they are known.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Failure::Engine(error) => error.to_string(),
            _ => match self.file() {
                Some(file) => format!("{} ({})", self.message(), file.display()),
                None => self.message(),
            },
        };
        let end = if text.ends_with(['.', '!', '?']) { "" } else { "." };
        write!(f, "{text}{end}")
    }
}

/// One line on standard error. `eprintln!` panics if the reader has left; the exit code says the same then.
pub(crate) fn complain(line: impl fmt::Display) {
    let _the_reader_has_left = writeln!(io::stderr(), "{line}");
}

/// `{"error": {…}}`.
fn error_object(kind: &str, message: &str, file: Option<&Path>, offset: Option<u64>) -> serde_json::Value {
    let file = file.map(|f| f.to_string_lossy());
    json!({ "error": { "kind": kind, "message": message, "file": file, "offset": offset } })
}

/// An error of the engine as it stands in JSON.
pub(crate) fn engine_error_json(error: &Error) -> serde_json::Value {
    error_object(&kind_word(error.kind()), error.message(), error.file(), error.offset())["error"].take()
}

fn kind_word(kind: ErrorKind) -> String {
    match kind {
        ErrorKind::Io => "io".into(),
        other => other.to_string().replace(' ', "_"),
    }
}

/// Prints what clap has to say (help and version included) and gives the exit code.
pub(crate) fn report_usage(error: &clap::Error) -> ExitCode {
    if error.use_stderr() && std::env::args_os().any(|arg| arg == "--json") {
        // What clap prints ends with the usage and a hint, after an empty line.
        let text = error.to_string();
        let lines = text.trim_start_matches("error: ").lines().map(str::trim).take_while(|line| !line.is_empty());
        return Failure::Usage(lines.collect::<Vec<_>>().join(" ")).report(true);
    }
    // A reader that has left is no reason to fail.
    let _ = error.print();
    ExitCode::from(if error.use_stderr() { 2 } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_sentences_and_have_their_codes() {
        let locked = Failure::from(Error::new(ErrorKind::Locked, "another program has it open").in_file("/db/LOCK"));
        assert_eq!(locked.to_string(), "locked: another program has it open (/db/LOCK).");
        assert_eq!(locked.code(), 4);
        assert_eq!(Failure::from(Error::corruption("x")).code(), 5);
        let os = Failure::os("read the value", "/nope", io::Error::from(io::ErrorKind::PermissionDenied));
        assert_eq!((os.to_string().as_str(), os.code()), ("cannot read the value: permission denied (/nope).", 3));
    }

    #[test]
    fn kinds_are_single_words() {
        assert_eq!(kind_word(ErrorKind::OutOfSpace), "out_of_space");
        assert_eq!(kind_word(ErrorKind::Io), "io");
    }
}
