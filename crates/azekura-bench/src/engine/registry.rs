//! From names on the command line to open engines.

use crate::engine::{Engine, Options};
use crate::failure::Result;
use std::path::Path;

/// The engines of this build, ours first.
pub(crate) fn names() -> Vec<&'static str> {
    let mut names = vec!["azekura"];
    if cfg!(feature = "fjall") {
        names.push("fjall");
    }
    names
}

/// Says in words why `name` cannot be run here.
pub(crate) fn check(name: &str) -> Result<()> {
    match name {
        known if names().contains(&known) => Ok(()),
        "fjall" => Err(format!("`{name}` is not in this build: add `--features {name}` (or `peers`)").into()),
        _ => Err(format!("no engine is called `{name}`; this build has {}", names().join(", ")).into()),
    }
}

/// Opens, or creates, the database of engine `name` in `dir`, at its partition [`super::options::PARTITION`].
pub(crate) fn open(name: &str, dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    check(name)?;
    match name {
        "azekura" => super::azekura::open(dir, options),
        #[cfg(feature = "fjall")]
        "fjall" => super::fjall::open(dir, options),
        _ => Err(format!("`{name}` is known but cannot be opened").into()),
    }
}
