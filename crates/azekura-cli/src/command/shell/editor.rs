//! Reads lines that are typed: editing, history and completion, by `rustyline`.

use std::env;
use std::fs;
use std::path::PathBuf;

use azekura::Database;
use rustyline::completion::{Completer, Pair};
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::Validator;
use rustyline::{CompletionType, Config, Context, Editor, Helper};

use super::completion::CompletionSource;
use crate::error::{CliError, Result, print_error};

/// Maximum number of lines in the history.
const HISTORY_LINES_MAX: usize = 1000;

/// Environment variable with the file of the history; empty: no file.
const HISTORY_VARIABLE: &str = "AZEKURA_HISTORY";

/// What a user typed.
#[derive(Debug)]
pub(super) enum TypedLine {
    Text(String),
    /// Ctrl-C discards the line.
    Discarded,
    /// Ctrl-D on an empty line, or a terminal that was closed.
    End,
}

/// Reads lines from a terminal.
pub(super) struct LineEditor {
    editor: Editor<CompletionHelper, FileHistory>,
    /// File of the history; `None` if there is none.
    history: Option<PathBuf>,
}

impl LineEditor {
    /// Prepares the terminal and reads the history of earlier runs.
    pub(super) fn new() -> Result<LineEditor> {
        let config = Config::builder()
            .completion_type(CompletionType::List)
            .auto_add_history(true)
            .history_ignore_space(true)
            .max_history_size(HISTORY_LINES_MAX);
        let editor = config.and_then(|config| Editor::with_config(config.build()));
        let mut editor: Editor<_, FileHistory> = editor.map_err(terminal_error)?;
        editor.set_helper(Some(CompletionHelper::default()));
        let history = history_file();
        if let Some(file) = history.as_deref().filter(|file| file.exists())
            && let Err(error) = editor.load_history(file)
        {
            print_error(format_args!("azekura: cannot read the history {}: {error}.", file.display()));
        }
        Ok(LineEditor { editor, history })
    }

    /// Reads one line. Completes partitions of `db`, and keys of its `partition`.
    pub(super) fn read_line(&mut self, prompt: &str, db: Option<&Database>, partition: &str) -> Result<TypedLine> {
        if let Some(helper) = self.editor.helper_mut() {
            helper.0 = CompletionSource { db: db.cloned(), partition: partition.to_string() };
        }
        match self.editor.readline(prompt) {
            Ok(line) => Ok(TypedLine::Text(line)),
            Err(ReadlineError::Interrupted) => Ok(TypedLine::Discarded),
            Err(ReadlineError::Eof) => Ok(TypedLine::End),
            Err(error) => Err(terminal_error(error)),
        }
    }

    /// Writes the history to its file, which only this user can read. Reports a failure.
    pub(super) fn save_history(&mut self) {
        let Some(file) = &self.history else { return };
        let created = file.parent().map_or(Ok(()), fs::create_dir_all).map_err(ReadlineError::from);
        if let Err(error) = created.and_then(|()| self.editor.append_history(file)) {
            print_error(format_args!("azekura: cannot write the history {}: {error}.", file.display()));
        }
    }
}

fn terminal_error(error: ReadlineError) -> CliError {
    CliError::os("read a line", "terminal", std::io::Error::other(error))
}

/// The file that [`HISTORY_VARIABLE`] names, or one in the directory of this user for such files.
fn history_file() -> Option<PathBuf> {
    if let Some(file) = env::var_os(HISTORY_VARIABLE) {
        return (!file.is_empty()).then(|| PathBuf::from(file));
    }
    let directory = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = directory("XDG_STATE_HOME").or_else(|| directory("LOCALAPPDATA"));
    let state = state.or_else(|| Some(directory("HOME")?.join(".local/state")))?;
    Some(state.join("azekura").join("history"))
}

/// Completes a line for the editor.
#[derive(Default)]
struct CompletionHelper(CompletionSource);

impl Helper for CompletionHelper {}
impl Highlighter for CompletionHelper {}
impl Validator for CompletionHelper {}
impl Hinter for CompletionHelper {
    type Hint = String;
}

impl Completer for CompletionHelper {
    type Candidate = Pair;

    fn complete(&self, line: &str, pos: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<Pair>)> {
        let found = self.0.complete(&line[..pos]);
        let pair = |text: String| Pair { display: text.trim_end().to_string(), replacement: text };
        Ok((found.start, found.candidates.into_iter().map(pair).collect()))
    }
}
