//! Finds a PostgreSQL that is installed on this machine.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::error::Error;

pub const OLDEST_MAJOR: u32 = 15;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installation {
    /// Where the programs really are, behind any links.
    pub bin_dir: PathBuf,
    pub version: Version,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    pub major: u32,
    /// As the program writes it: `15.18`, `19beta1`.
    pub text: String,
}

/// Where to look.
#[derive(Debug)]
pub struct Search<'a> {
    /// The one place, if the caller names it.
    pub bin_dir: Option<&'a Path>,
    pub path: Option<&'a OsStr>,
    pub usual_places: Vec<PathBuf>,
}

impl Installation {
    pub fn postgres(&self) -> PathBuf {
        self.bin_dir.join("postgres")
    }

    pub fn initdb(&self) -> PathBuf {
        self.bin_dir.join("initdb")
    }
}

impl Version {
    /// Reads `postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)`.
    pub fn parse(answer: &str) -> Option<Self> {
        let text = answer.split_once("(PostgreSQL)")?.1.split_whitespace().next()?;
        Some(Self {
            major: leading_number(text)?,
            text: text.to_owned(),
        })
    }
}

/// The first installation that is new enough and fits the data that `data` holds, if any. Several
/// majors side by side are usual on Debian, so a misfit only counts when nothing better turns up.
pub fn find(
    search: &Search<'_>,
    data: &Path,
    version_of: impl Fn(&Path) -> Result<Version, Error>,
) -> Result<Installation, Error> {
    let mut misfit = None;
    for bin_dir in search.candidates()? {
        let fitting = version_of(&bin_dir.join("postgres")).and_then(|version| fit(&bin_dir, version, data));
        match fitting {
            Ok(version) => return Ok(Installation { bin_dir, version }),
            Err(error) => misfit = misfit.or(Some(error)),
        }
    }
    Err(misfit.unwrap_or_else(|| Error::NotFound { advice: advice() }))
}

fn fit(bin_dir: &Path, version: Version, data: &Path) -> Result<Version, Error> {
    if version.major < OLDEST_MAJOR {
        return Err(Error::TooOld {
            bin_dir: bin_dir.into(),
            version: version.text,
            advice: advice(),
        });
    }
    match made_by(data) {
        Some(made_by) if made_by != version.major => Err(Error::OtherMajor {
            data: data.into(),
            made_by,
            version: version.text,
        }),
        Some(_) | None => Ok(version),
    }
}

fn made_by(data: &Path) -> Option<u32> {
    leading_number(&fs::read_to_string(data.join("PG_VERSION")).ok()?)
}

fn leading_number(text: &str) -> Option<u32> {
    text.split(|character: char| !character.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

impl Search<'_> {
    fn candidates(&self) -> Result<Vec<PathBuf>, Error> {
        if let Some(bin_dir) = self.bin_dir {
            let found = programs_in(bin_dir).ok_or_else(|| Error::NotInBinDir {
                bin_dir: bin_dir.into(),
            })?;
            return Ok(vec![found]);
        }
        let mut candidates = Vec::new();
        let places = self
            .on_path()
            .chain(self.told_by_pg_config())
            .chain(self.usual_places.iter().cloned());
        for found in places.filter_map(|place| programs_in(&place)) {
            if !candidates.contains(&found) {
                candidates.push(found);
            }
        }
        Ok(candidates)
    }

    fn on_path(&self) -> impl Iterator<Item = PathBuf> {
        self.path
            .into_iter()
            .flat_map(env::split_paths)
            .filter(|place| place.is_absolute())
    }

    fn told_by_pg_config(&self) -> Option<PathBuf> {
        let pg_config = self
            .on_path()
            .map(|place| place.join("pg_config"))
            .find(|path| path.is_file())?;
        let mut output = Command::new(pg_config).arg("--bindir").output().ok()?;
        output.stdout.truncate(output.stdout.trim_ascii_end().len());
        Some(PathBuf::from(std::ffi::OsString::from_vec(output.stdout)))
    }
}

/// The directory behind `place`. It is the file that is followed, not the directory: a link in
/// `/usr/local/bin` leads to the directory in which the programs find each other and their data.
fn programs_in(place: &Path) -> Option<PathBuf> {
    let postgres = fs::canonicalize(place.join("postgres")).ok()?;
    let bin_dir = postgres.parent()?;
    (postgres.ends_with("postgres") && bin_dir.join("initdb").is_file()).then(|| bin_dir.to_owned())
}

/// Where packages put PostgreSQL without putting it on the `PATH`, the newest first.
pub fn usual_places() -> Vec<PathBuf> {
    let families = [
        // Debian and Ubuntu; Red Hat's from postgresql.org; Alpine.
        ("/usr/lib/postgresql", "", "bin"),
        ("/usr", "pgsql-", "bin"),
        ("/usr/libexec", "postgresql", ""),
        // Homebrew on Apple's processors and on Intel's; Postgres.app.
        ("/opt/homebrew/opt", "postgresql@", "bin"),
        ("/usr/local/opt", "postgresql@", "bin"),
        ("/Applications/Postgres.app/Contents/Versions", "", "bin"),
    ];
    families
        .into_iter()
        .flat_map(|(parent, prefix, below)| versions_in(parent, prefix, below))
        .collect()
}

fn versions_in(parent: &str, prefix: &str, below: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let mut found: Vec<(u32, PathBuf)> = entries
        .filter_map(|entry| {
            let major = leading_number(entry.file_name().to_str()?.strip_prefix(prefix)?)?;
            Some((major, entry.path().join(below)))
        })
        .collect();
    found.sort_by(|one, other| other.cmp(one));
    found.into_iter().map(|(_, place)| place).collect()
}

/// How PostgreSQL gets onto this system.
fn advice() -> &'static str {
    if cfg!(target_os = "macos") {
        return "brew install postgresql@17";
    }
    advice_for(&fs::read_to_string("/etc/os-release").unwrap_or_default())
}

fn advice_for(os_release: &str) -> &'static str {
    let value = |key: &str| {
        os_release
            .lines()
            .find_map(|line| line.strip_prefix(key))
            .unwrap_or_default()
    };
    let families = [value("ID="), value("ID_LIKE=")];
    // A derived system names its own id first and those it is like after.
    let mut ids = families.iter().flat_map(|ids| ids.trim_matches('"').split_whitespace());
    ids.find_map(|id| match id {
        "debian" | "ubuntu" => Some("apt-get install postgresql"),
        "fedora" | "rhel" | "centos" => Some("dnf install postgresql-server"),
        "alpine" => Some("apk add postgresql"),
        "arch" => Some("pacman -S postgresql"),
        "suse" | "opensuse" => Some("zypper install postgresql-server"),
        _ => None,
    })
    .unwrap_or("install PostgreSQL's server package")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read_from_what_the_program_answers() {
        let read = |answer| Version::parse(answer).map(|version| (version.major, version.text));
        let debian = "postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n";
        assert_eq!(read(debian), Some((15, "15.18".into())));
        assert_eq!(read("postgres (PostgreSQL) 19beta1"), Some((19, "19beta1".into())));
        assert_eq!(read("hello"), None);
    }

    #[test]
    fn the_advice_names_this_systems_package() {
        assert_eq!(advice_for("ID=ubuntu\nID_LIKE=debian\n"), "apt-get install postgresql");
        assert_eq!(
            advice_for("ID=\"rocky\"\nID_LIKE=\"rhel centos fedora\"\n"),
            "dnf install postgresql-server"
        );
        assert_eq!(advice_for("NAME=Alpine\nID=alpine\n"), "apk add postgresql");
        assert_eq!(advice_for(""), "install PostgreSQL's server package");
    }

    #[test]
    fn a_machine_without_postgres_gets_one_message_with_both_ways_out() {
        let search = Search {
            bin_dir: None,
            path: None,
            usual_places: Vec::new(),
        };
        let error = find(&search, Path::new("/nowhere"), |_| {
            unreachable!("there is nothing to ask")
        })
        .unwrap_err();
        let message = error.to_string();
        assert!(
            message.contains("install") && message.contains("DATABASE_URL"),
            "{message}"
        );
    }

    #[test]
    fn among_several_the_one_that_made_the_data_is_taken() {
        let root = tempfile::tempdir().unwrap();
        let places = ["17", "15", "9"].map(|major| root.path().join(major));
        for place in &places {
            fs::create_dir(place).unwrap();
            fs::write(place.join("postgres"), "").unwrap();
            fs::write(place.join("initdb"), "").unwrap();
        }
        let search = Search {
            bin_dir: None,
            path: None,
            usual_places: places.to_vec(),
        };
        let version_of = |postgres: &Path| {
            let major = postgres.parent().unwrap().file_name().unwrap().to_str().unwrap();
            Ok(Version {
                major: major.parse().unwrap(),
                text: format!("{major}.1"),
            })
        };
        let found = |data: &Path| find(&search, data, version_of).map(|installation| installation.version.major);

        assert_eq!(found(root.path()).unwrap(), 17);
        fs::write(root.path().join("PG_VERSION"), "15\n").unwrap();
        assert_eq!(found(root.path()).unwrap(), 15);
        fs::write(root.path().join("PG_VERSION"), "16\n").unwrap();
        assert!(matches!(found(root.path()), Err(Error::OtherMajor { made_by: 16, .. })));
    }
}
