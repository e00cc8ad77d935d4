//! Paths as keys: relative, with `/` between the components, in bytes.

use std::path::{Path, PathBuf};

/// The key of `path`, which is below `root`.
pub(crate) fn from_path(path: &Path, root: &Path) -> Vec<u8> {
    let relative = path.strip_prefix(root).unwrap_or(path);
    relative.iter().map(|part| part.as_encoded_bytes()).collect::<Vec<_>>().join(&b'/')
}

/// The relative path of a key; `None` if the key is not a path that stays below the directory it is joined to.
pub(crate) fn to_relative_path(key: &[u8]) -> Option<PathBuf> {
    let safe = |part: &[u8]| !part.is_empty() && part != b"." && part != b".." && !part.contains(&0);
    if !key.split(|&byte| byte == b'/').all(safe) {
        return None;
    }
    system_path(key)
}

#[cfg(unix)]
fn system_path(key: &[u8]) -> Option<PathBuf> {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    Some(PathBuf::from(OsStr::from_bytes(key)))
}

#[cfg(not(unix))]
fn system_path(key: &[u8]) -> Option<PathBuf> {
    let text = std::str::from_utf8(key).ok()?;
    (!text.contains(['\\', ':'])).then(|| PathBuf::from(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_paths_match() {
        let key = from_path(Path::new("/root/a/b c/d.txt"), Path::new("/root"));
        assert_eq!(key, b"a/b c/d.txt");
        assert_eq!(to_relative_path(&key), Some(PathBuf::from("a/b c/d.txt")));
    }

    #[test]
    fn unsafe_keys_have_no_relative_path() {
        for key in ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "a\0b"] {
            assert_eq!(to_relative_path(key.as_bytes()), None, "{key:?}");
        }
    }
}
