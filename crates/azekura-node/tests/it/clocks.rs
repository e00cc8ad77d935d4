//! Wall clocks of nodes that jump: a library that is preloaded into a node moves its wall clock.

use std::ffi::OsString;
use std::process::Command;
use tempfile::TempDir;

/// The library, built, and the offsets of the nodes' wall clocks.
pub(crate) struct Clocks(TempDir);

impl Clocks {
    /// # Errors
    /// If the library cannot be built here.
    pub(crate) fn new() -> Result<Clocks, String> {
        let dir = tempfile::tempdir().unwrap();
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/clock/clock.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-o"]).arg(dir.path().join("clock.so")).args([source, "-ldl"]);
        let output = compiler.output().map_err(|error| error.to_string())?;
        let problem = String::from_utf8_lossy(&output.stderr);
        if output.status.success() { Ok(Clocks(dir)) } else { Err(format!("clock.c cannot be built: {problem}")) }
    }

    /// The environment of a node.
    pub(crate) fn variables(&self, id: u64) -> [(&'static str, OsString); 2] {
        let path = |name: String| self.0.path().join(name).into_os_string();
        [("LD_PRELOAD", path("clock.so".into())), ("AZEKURA_TEST_CLOCK", path(format!("clock-{id}")))]
    }

    /// Moves the wall clock of a node, seen from the real time.
    pub(crate) fn set(&self, id: u64, seconds: i64) {
        let path = self.0.path().join(format!("clock-{id}"));
        // By a rename, because the node may read the file at any time.
        let next = path.with_extension("next");
        std::fs::write(&next, seconds.to_string()).unwrap();
        std::fs::rename(next, path).unwrap();
    }
}
