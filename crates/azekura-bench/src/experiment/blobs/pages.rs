//! The pages that are stored: every HTML file below a directory, or generated ones, in a random order.
//!
//! The parent packs them into one file, so that its children need not look for tens of thousands of files each.

use crate::experiment::blobs::generate::Generator;
use crate::failure::{Result, wrong};
use crate::workload::rng::Rng;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Not every engine takes longer keys.
const KEY_BYTES_MAX: usize = 400;
/// No page is larger than this part of all that is taken.
const PART_MAX: u64 = 32;
const SEED: u64 = 41;

/// Where pages came from, and how many there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packed {
    from: &'static str,
    pub(super) pages: u64,
    pub(super) bytes: u64,
}

impl Packed {
    /// `pages_from` and the like.
    pub(super) fn put(&self, answer: &mut Map<String, Value>) {
        answer.insert("pages_from".into(), json!(self.from));
        answer.insert("pages".into(), json!(self.pages));
        answer.insert("page_bytes".into(), json!(self.bytes));
        answer.insert("mean_page_bytes".into(), json!(self.bytes as f64 / self.pages.max(1) as f64));
    }
}

/// Which pages are wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// No smaller pages.
    pub(super) least_bytes: u64,
    /// As many pages as have this many bytes together.
    pub(super) total_bytes: u64,
    /// So many pages at most.
    pub(super) pages: u64,
}

/// Writes pages from below `asked` into the file `to`; without it from the documentation of the Rust toolchain, or
/// generated ones if there is none.
///
/// # Errors
/// There are no pages in the directory that was asked for; those of reading and writing.
pub(super) fn pack(asked: Option<&Path>, wanted: Wanted, to: &Path) -> Result<Packed> {
    let found = match asked {
        Some(dir) => from_files(dir, wanted, to)?,
        None => documentation().map(|dir| from_files(&dir, wanted, to)).transpose()?.unwrap_or_default(),
    };
    match (found, asked) {
        ((0, _), Some(dir)) => Err(format!("there are no HTML pages below {}", dir.display()).into()),
        ((0, _), None) => {
            let (pages, bytes) = generated(wanted, to)?;
            Ok(Packed { from: "generated", pages, bytes })
        }
        ((pages, bytes), _) => Ok(Packed { from: "files", pages, bytes }),
    }
}

/// Where the toolchain has its documentation, if it has any.
fn documentation() -> Option<PathBuf> {
    let told = Command::new("rustc").args(["--print", "sysroot"]).output().ok().filter(|told| told.status.success())?;
    let dir = Path::new(String::from_utf8(told.stdout).ok()?.trim()).join("share/doc");
    dir.is_dir().then_some(dir)
}

/// Every HTML file below `dir` with its length, by path.
fn find(dir: &Path, found: &mut Vec<(PathBuf, u64)>) -> Result<()> {
    let mut entries = std::fs::read_dir(dir)?.collect::<std::io::Result<Vec<_>>>()?;
    entries.sort_by_key(std::fs::DirEntry::path);
    for entry in entries {
        let (path, kind) = (entry.path(), entry.file_type()?); // links are not followed
        if kind.is_dir() {
            find(&path, found)?;
        } else if kind.is_file() && path.extension().is_some_and(|end| end == "html" || end == "htm") {
            found.push((path, entry.metadata()?.len()));
        }
    }
    Ok(())
}

fn from_files(dir: &Path, wanted: Wanted, to: &Path) -> Result<(u64, u64)> {
    let mut found = Vec::new();
    find(dir, &mut found)?;
    let mut rng = Rng::new(SEED);
    for i in (1..found.len()).rev() {
        found.swap(i, rng.below(i as u64 + 1) as usize);
    }
    let most = wanted.total_bytes / PART_MAX;
    let mut packer = Packer::new(wanted, to)?;
    for (path, len) in found.iter().filter(|(_, len)| (wanted.least_bytes.max(1)..=most).contains(len)) {
        let key = path.strip_prefix(dir)?.as_os_str().as_bytes();
        if packer.is_full() {
            break;
        }
        if key.len() <= KEY_BYTES_MAX {
            let page = std::fs::read(path)?;
            if page.len() as u64 != *len {
                return Err(format!("{} is being changed", path.display()).into());
            }
            packer.add(key, &page)?;
        }
    }
    packer.finish()
}

fn generated(wanted: Wanted, to: &Path) -> Result<(u64, u64)> {
    let (mut generator, mut packer) = (Generator::new(SEED), Packer::new(wanted, to)?);
    let mut number = 0u64;
    while !packer.is_full() {
        let page = generator.page();
        number += 1;
        if page.len() as u64 >= wanted.least_bytes {
            packer.add(format!("site/{:02x}/page{number}.html", number % 251).as_bytes(), page.as_bytes())?;
        }
    }
    packer.finish()
}

/// Writes pages one behind the other, each with the lengths of key and page before it.
struct Packer {
    file: BufWriter<File>,
    wanted: Wanted,
    pages: u64,
    bytes: u64,
}

impl Packer {
    fn new(wanted: Wanted, to: &Path) -> Result<Packer> {
        Ok(Packer { file: BufWriter::new(File::create(to)?), wanted, pages: 0, bytes: 0 })
    }

    fn is_full(&self) -> bool {
        self.bytes >= self.wanted.total_bytes || self.pages >= self.wanted.pages
    }

    fn add(&mut self, key: &[u8], page: &[u8]) -> Result<()> {
        for len in [key.len(), page.len()] {
            self.file.write_all(&u32::try_from(len)?.to_le_bytes())?;
        }
        self.file.write_all(key)?;
        self.file.write_all(page)?;
        (self.pages, self.bytes) = (self.pages + 1, self.bytes + page.len() as u64);
        Ok(())
    }

    fn finish(mut self) -> Result<(u64, u64)> {
        self.file.flush()?;
        Ok((self.pages, self.bytes))
    }
}

/// Packed pages, in memory. Immutable.
pub(super) struct Pages {
    packed: Vec<u8>,
    /// Of key and page.
    places: Vec<(Range<usize>, Range<usize>)>,
}

impl Pages {
    /// Those that were packed into a file, at least one.
    pub(super) fn read(path: &Path) -> Result<Pages> {
        let packed = std::fs::read(path)?;
        let (mut places, mut at) = (Vec::new(), 0);
        while at < packed.len() {
            let len = |at: usize| -> Result<usize> {
                let bytes = packed.get(at..at + 4).ok_or("the packed pages end within a length")?;
                Ok(u32::from_le_bytes(bytes.try_into()?) as usize)
            };
            let (key, page) = (at + 8..at + 8 + len(at)?, len(at + 4)?);
            let page = key.end..key.end + page;
            at = page.end;
            places.push((key, page));
        }
        if at != packed.len() || places.is_empty() {
            return Err("the packed pages do not end with a page".into());
        }
        Ok(Pages { packed, places })
    }

    /// How many there are; from that index on they come again, with another key and a comment in front.
    pub(super) fn count(&self) -> u64 {
        self.places.len() as u64
    }

    fn place(&self, index: u64) -> (&[u8], &[u8], u64) {
        let (key, page) = &self.places[(index % self.count()) as usize];
        (&self.packed[key.clone()], &self.packed[page.clone()], index / self.count())
    }

    /// Writes the key of the page at `index` over `out`.
    pub(super) fn key(&self, index: u64, out: &mut Vec<u8>) {
        let (key, _, copy) = self.place(index);
        out.clear();
        out.extend_from_slice(key);
        if copy > 0 {
            out.extend_from_slice(format!("?copy={copy}").as_bytes());
        }
    }

    /// Writes the page at `index` in that version over `out`: as it is in version 0 of its first copy, else with a
    /// comment in front.
    pub(super) fn page(&self, index: u64, version: u64, out: &mut Vec<u8>) {
        let (_, page, copy) = self.place(index);
        out.clear();
        out.extend_from_slice(comment(version, copy).as_bytes());
        out.extend_from_slice(page);
    }

    /// That `found` is that page, to the last byte.
    ///
    /// # Errors
    /// It is not.
    pub(super) fn check(&self, index: u64, version: u64, found: &[u8]) -> Result<()> {
        let (_, page, copy) = self.place(index);
        match found.strip_prefix(comment(version, copy).as_bytes()) == Some(page) {
            true => Ok(()),
            false => Err(wrong(format!("page {index} in version {version} came back as something else"))),
        }
    }
}

fn comment(version: u64, copy: u64) -> String {
    if (version, copy) == (0, 0) { String::new() } else { format!("<!-- version {version} of copy {copy} -->\n") }
}

#[cfg(test)]
pub(super) mod tests {
    use super::{Packed, Pages, Wanted, pack};
    use crate::failure::{Kind, Told};
    use std::fs;
    use std::path::{Path, PathBuf};

    const ALL: Wanted = Wanted { least_bytes: 0, total_bytes: 1 << 20, pages: u64::MAX };

    /// A few hundred generated pages of at least 1 KiB, in the file that is given.
    pub(in crate::experiment::blobs) fn small_pack(dir: &Path) -> PathBuf {
        let to = dir.join("pages");
        super::generated(Wanted { least_bytes: 1024, total_bytes: 600_000, pages: 60 }, &to).unwrap();
        to
    }

    #[test]
    fn every_html_file_below_a_directory_is_taken_once() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("in/below")).unwrap();
        for (name, text) in [("a.html", "one"), ("below/b.htm", "two"), ("below/c.css", "no"), ("empty.html", "")] {
            fs::write(dir.path().join("in").join(name), text).unwrap();
        }
        let to = dir.path().join("pages");
        let packed = pack(Some(&dir.path().join("in")), ALL, &to).unwrap();
        assert_eq!(packed, Packed { from: "files", pages: 2, bytes: 6 });
        let pages = Pages::read(&to).unwrap();
        let mut all = Vec::new();
        for index in 0..4 {
            let (mut key, mut page) = (Vec::new(), Vec::new());
            pages.key(index, &mut key);
            pages.page(index, 0, &mut page);
            pages.check(index, 0, &page).unwrap();
            all.push((String::from_utf8(key).unwrap(), String::from_utf8(page).unwrap()));
        }
        all.sort();
        let comment = "<!-- version 0 of copy 1 -->\n";
        let expected =
            [("a.html", "one"), ("a.html?copy=1", "one"), ("below/b.htm", "two"), ("below/b.htm?copy=1", "two")];
        for ((key, page), (name, text)) in all.iter().zip(expected) {
            let front = if name.contains('?') { comment } else { "" };
            assert_eq!((key.as_str(), page.as_str()), (name, format!("{front}{text}").as_str()));
        }
        assert!(pack(Some(&dir.path().join("in/none")), ALL, &to).is_err());
        fs::create_dir(dir.path().join("void")).unwrap();
        let error = pack(Some(&dir.path().join("void")), ALL, &to).unwrap_err().to_string();
        assert!(error.contains("no HTML pages"), "{error}");
    }

    #[test]
    fn as_many_pages_as_wanted_are_generated_and_small_ones_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let pages = Pages::read(&small_pack(dir.path())).unwrap();
        assert!((20..=60).contains(&pages.count()), "{}", pages.count());
        let (mut page, mut other) = (Vec::new(), Vec::new());
        for index in 0..pages.count() {
            pages.page(index, 0, &mut page);
            assert!(page.len() >= 1024);
        }
        pages.page(7, 1, &mut page);
        pages.page(7, 2, &mut other);
        assert!(page != other && page.len() == other.len());
        pages.check(7, 2, &other).unwrap();
        *other.last_mut().unwrap() ^= 1;
        for (index, version, found) in [(7, 2, &page), (8, 1, &page), (7, 2, &other)] {
            let error = pages.check(index, version, found).unwrap_err();
            assert_eq!(Told::of(&error).kind, Kind::Wrong);
        }
    }

    #[test]
    fn a_broken_pack_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let to = small_pack(dir.path());
        let whole = fs::read(&to).unwrap();
        for len in [0, 3, 7, whole.len() - 1] {
            fs::write(&to, &whole[..len]).unwrap();
            assert!(Pages::read(&to).is_err(), "{len}");
        }
    }
}
