//! `shell`: commands on one open database, typed at a prompt or read from standard input.
//!
//! `run` has the two loops, over lines that are typed and over lines of a script. `words` splits a line into words,
//! `shell_command` defines the commands, and `session` carries them out with the functions of the commands of the same
//! name. `editor` reads a line with history and completion; `completion` finds the candidates.
//!
//! Invariants: a script ends at its first command that fails, and the error names the line. A line that cannot be
//! parsed changes nothing. The directory of a database is created by a write only.

mod completion;
mod editor;
mod run;
mod session;
mod shell_command;
mod words;

pub(crate) use run::run;
