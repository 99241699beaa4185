//! The parts of a statement, also those inside WITH: what each of them does to which table.

use super::token::{SqlToken, TokenKind, tokens};

/// A part of a statement that reads or writes one table.
#[derive(Debug)]
pub(super) struct Part<'a> {
    pub(super) verb: Verb,
    /// Name, without its schema.
    pub(super) table: String,
    /// Alias of the table in the part, if it has one.
    alias: Option<String>,
    /// Offset of the part in the statement, bytes.
    pub(super) at: usize,
    /// INSERT: the columns it names; empty if it names none.
    pub(super) columns: Vec<String>,
    /// INSERT … VALUES: the first row's expressions.
    pub(super) values: Vec<Vec<SqlToken<'a>>>,
    /// Assignments of UPDATE … SET, or of ON CONFLICT DO UPDATE SET.
    pub(super) assignments: Vec<Assignment<'a>>,
    /// INSERT: whether it names its conflict target, for which PostgreSQL requires a unique index.
    pub(super) is_guarded: bool,
    /// WHERE condition of the part, or of its DO UPDATE.
    pub(super) condition: Vec<SqlToken<'a>>,
    /// SELECT: the selected expressions.
    pub(super) selected: Vec<SqlToken<'a>>,
    /// SELECT: whether it locks rows, with FOR UPDATE or the like.
    pub(super) is_locking: bool,
}

/// Operation of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Select,
    Insert,
    Update,
    Delete,
    Merge,
}

/// `column = expression`
#[derive(Debug)]
pub(super) struct Assignment<'a> {
    pub(super) column: String,
    pub(super) value: Vec<SqlToken<'a>>,
    pub(super) at: usize,
}

/// Key words that end the clause before them.
const CLAUSES: &[&str] = &[
    "FROM",
    "WHERE",
    "SET",
    "VALUES",
    "RETURNING",
    "ON",
    "USING",
    "GROUP",
    "ORDER",
    "LIMIT",
    "HAVING",
    "FOR",
    "UNION",
    "JOIN",
    "LEFT",
    "RIGHT",
    "INNER",
    "CROSS",
    "FULL",
    "OFFSET",
    "WINDOW",
    "EXCEPT",
    "INTERSECT",
    "DO",
    "SELECT",
    "DEFAULT",
    "OVERRIDING",
    "AS",
    "NATURAL",
];

/// Returns the parts of a statement, in the order in which they are written.
pub(super) fn parts(text: &str) -> Vec<Part<'_>> {
    let tokens = tokens(text);
    let mut found = Vec::new();
    for (index, token) in tokens.iter().enumerate() {
        let before = index.checked_sub(1).map(|before| tokens[before]);
        let is_clause = before.is_some_and(|before| {
            ["FOR", "DO", "KEY", "ON", "THEN", "."]
                .iter()
                .any(|word| before.is(word) || before.text == *word)
        });
        let verb = match token.kind == TokenKind::Word && !is_clause {
            true if token.is("SELECT") => Verb::Select,
            true if token.is("INSERT") => Verb::Insert,
            true if token.is("UPDATE") => Verb::Update,
            true if token.is("DELETE") => Verb::Delete,
            true if token.is("MERGE") => Verb::Merge,
            _ => continue,
        };
        let end = tokens[index..]
            .iter()
            .position(|other| other.depth < token.depth)
            .map_or(tokens.len(), |length| index + length);
        found.extend(Reader { tokens: &tokens[index..end], depth: token.depth }.part(verb));
    }
    found
}

/// Reader of one part.
struct Reader<'t, 'a> {
    tokens: &'t [SqlToken<'a>],
    depth: usize,
}

impl<'a> Reader<'_, 'a> {
    fn part(&self, verb: Verb) -> Option<Part<'a>> {
        let name_at = match verb {
            Verb::Select | Verb::Delete => self.clause("FROM", 1)? + 1,
            Verb::Insert | Verb::Merge => self.clause("INTO", 1)? + 1,
            Verb::Update => 1,
        };
        let (table, alias, after) = self.table(name_at)?;
        let conflict = (verb == Verb::Insert).then(|| self.conflict(after)).flatten();
        let set = match (verb, conflict) {
            (Verb::Update, _) => self.clause("SET", after),
            (Verb::Insert, Some(conflict)) => self.clause("SET", conflict),
            _ => None,
        };
        let condition_from = match verb {
            Verb::Insert => set,
            _ => Some(after),
        };
        Some(Part {
            verb,
            table,
            alias,
            at: self.tokens[0].at,
            columns: if verb == Verb::Insert { self.columns(after) } else { Vec::new() },
            values: if verb == Verb::Insert { self.values(after) } else { Vec::new() },
            assignments: set.map(|set| self.assignments(set + 1)).unwrap_or_default(),
            is_guarded: conflict
                .and_then(|at| self.tokens.get(at + 2))
                .is_some_and(|token| token.is_symbol('(') || token.is("ON")),
            condition: condition_from
                .and_then(|from| self.clause("WHERE", from))
                .map(|at| self.until_clause(at + 1))
                .unwrap_or_default(),
            selected: if verb == Verb::Select { self.until_clause(1) } else { Vec::new() },
            is_locking: verb == Verb::Select && self.clause("FOR", 1).is_some(),
        })
    }

    /// Returns the position of a key word in this part, not deeper.
    fn clause(&self, word: &str, from: usize) -> Option<usize> {
        (from..self.tokens.len())
            .find(|at| self.tokens[*at].depth == self.depth && self.tokens[*at].is(word))
    }

    /// Reads `[ONLY] [schema.]table [[AS] alias]`. Returns table and alias, and the position behind
    /// them.
    fn table(&self, at: usize) -> Option<(String, Option<String>, usize)> {
        let mut at = at + usize::from(self.tokens.get(at)?.is("ONLY"));
        let mut name = self.tokens.get(at)?.name()?;
        while self.tokens.get(at + 1).is_some_and(|token| token.is_symbol('.')) {
            name = self.tokens.get(at + 2)?.name()?;
            at += 2;
        }
        at += 1;
        let has_as = self.tokens.get(at).is_some_and(|token| token.is("AS"));
        let alias = self
            .tokens
            .get(at + usize::from(has_as))
            .filter(|token| !CLAUSES.iter().any(|clause| token.is(clause)));
        match alias.and_then(SqlToken::name) {
            Some(alias) => Some((name, Some(alias), at + 1 + usize::from(has_as))),
            None => Some((name, None, at)),
        }
    }

    /// Returns the tokens up to the next clause of this part.
    fn until_clause(&self, from: usize) -> Vec<SqlToken<'a>> {
        let ends = |token: &SqlToken<'_>| {
            token.depth == self.depth
                && CLAUSES.iter().any(|clause| *clause != "AS" && token.is(clause))
        };
        self.tokens.iter().skip(from).take_while(|token| !ends(token)).copied().collect()
    }

    /// Returns the position of ON CONFLICT.
    fn conflict(&self, from: usize) -> Option<usize> {
        (from..self.tokens.len()).find(|at| {
            let next = self.tokens.get(at + 1);
            self.tokens[*at].depth == self.depth
                && self.tokens[*at].is("ON")
                && next.is_some_and(|next| next.is("CONFLICT"))
        })
    }

    /// Reads `(a, b)` right behind the table of an INSERT.
    fn columns(&self, at: usize) -> Vec<String> {
        match self.tokens.get(at) {
            Some(token) if token.is_symbol('(') => {
                self.list(at).iter().filter_map(|item| item.first()?.name()).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Returns the first row behind VALUES.
    fn values(&self, from: usize) -> Vec<Vec<SqlToken<'a>>> {
        match self.clause("VALUES", from) {
            Some(at) if self.tokens.get(at + 1).is_some_and(|token| token.is_symbol('(')) => {
                self.list(at + 1)
            }
            _ => Vec::new(),
        }
    }

    /// Returns the items between a parenthesis and its partner.
    fn list(&self, open: usize) -> Vec<Vec<SqlToken<'a>>> {
        let inside: Vec<_> = self.tokens[open + 1..]
            .iter()
            .take_while(|token| token.depth > self.depth)
            .copied()
            .collect();
        split(&inside, self.depth + 1)
    }

    /// Reads `a = x, (b, c) = (y, z)`.
    fn assignments(&self, from: usize) -> Vec<Assignment<'a>> {
        let mut found = Vec::new();
        for item in split(&self.until_clause(from), self.depth) {
            let Some(equals) =
                item.iter().position(|token| token.depth == self.depth && token.is_symbol('='))
            else {
                continue;
            };
            let (left, right) = (&item[..equals], &item[equals + 1..]);
            for token in left
                .iter()
                .filter(|token| matches!(token.kind, TokenKind::Word | TokenKind::Quoted))
            {
                let column = token.name().unwrap_or_default();
                found.push(Assignment { column, value: right.to_vec(), at: token.at });
            }
        }
        found
    }
}

/// Returns whether a comparison of order begins at a token; `->`, `#>` and `@>` are none.
fn is_comparison(tokens: &[SqlToken<'_>], at: usize) -> bool {
    let touches = |other: usize| tokens[other.min(at)].at + 1 == tokens[other.max(at)].at;
    let joins = |other: usize, symbols: &[char]| {
        touches(other) && symbols.iter().any(|symbol| tokens[other].is_symbol(*symbol))
    };
    let follows = at > 0 && joins(at - 1, &['-', '#', '@', '>', '<']);
    let leads = at + 1 < tokens.len() && joins(at + 1, &['@', '>']);
    (tokens[at].is_symbol('<') || tokens[at].is_symbol('>')) && !follows && !leads
}

/// Splits tokens into the items between commas of this depth.
fn split<'a>(tokens: &[SqlToken<'a>], depth: usize) -> Vec<Vec<SqlToken<'a>>> {
    let items = tokens.split(|token| token.depth == depth && token.is_symbol(','));
    items.filter(|item| !item.is_empty()).map(<[_]>::to_vec).collect()
}

impl Part<'_> {
    /// Returns whether an expression mentions a column of this part's own row.
    pub(super) fn mentions(&self, expression: &[SqlToken<'_>], column: &str) -> bool {
        expression.iter().enumerate().any(|(index, token)| {
            if token.name().as_deref() != Some(column) {
                return false;
            }
            let is_qualified = index >= 2 && expression[index - 1].is_symbol('.');
            let qualifier = is_qualified.then(|| expression[index - 2].name()).flatten();
            qualifier.is_none_or(|name| name == self.table || Some(name) == self.alias)
        })
    }

    /// Returns whether an assignment computes a column's new value from the old one, as `n = n + 1`
    /// does. `greatest(n, $1)` does not: applied twice, it has the effect of once.
    pub(super) fn is_delta(&self, assignment: &Assignment<'_>) -> bool {
        let value = &assignment.value;
        let computes = value.iter().enumerate().any(|(index, token)| {
            let is_arrow = token.is_symbol('-')
                && value.get(index + 1).is_some_and(|next| next.is_symbol('>'));
            !is_arrow && ['+', '-', '*', '/', '|'].iter().any(|symbol| token.is_symbol(*symbol))
        });
        computes && self.mentions(value, &assignment.column)
    }

    /// Returns whether the part overwrites a column whatever the row holds. The value does not
    /// mention the column. The condition neither compares an order nor mentions an assigned column.
    pub(super) fn is_blind(&self, assignment: &Assignment<'_>) -> bool {
        let compares = (0..self.condition.len()).any(|at| is_comparison(&self.condition, at));
        let is_conditional =
            self.assignments.iter().any(|other| self.mentions(&self.condition, &other.column));
        !compares && !is_conditional && !self.mentions(&assignment.value, &assignment.column)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn only(text: &str) -> Part<'_> {
        let mut parts = parts(text);
        assert_eq!(parts.len(), 1, "{text}: {parts:?}");
        parts.remove(0)
    }

    #[test]
    fn updates_are_read_with_what_they_set() {
        let part = only(
            "UPDATE shop.account AS a SET balance = a.balance + $1, (n, seen) = ($2, \
                greatest(a.seen, $3)) WHERE id = $4 RETURNING n",
        );
        assert_eq!((part.verb, part.table.as_str()), (Verb::Update, "account"));
        let columns: Vec<_> = part
            .assignments
            .iter()
            .map(|a| (a.column.as_str(), part.is_delta(a), part.is_blind(a)))
            .collect();
        assert_eq!(columns, [("balance", true, false), ("n", false, true), ("seen", false, false)]);
        assert_eq!(
            part.condition.iter().map(|token| token.text).collect::<Vec<_>>(),
            ["id", "=", "$4"]
        );
    }

    #[test]
    fn a_version_in_the_condition_makes_an_update_careful() {
        for text in [
            "UPDATE t SET a = $1, v = $2 WHERE id = $3 AND v < $2",
            "UPDATE t SET a = $1, v = $2 WHERE id = $3 AND v = $4",
        ] {
            let part = only(text);
            assert!(part.assignments.iter().all(|assignment| !part.is_blind(assignment)), "{text}");
        }
        for text in [
            "UPDATE t SET a = $1 WHERE id = ($2::json->>'id')::int",
            "UPDATE t SET a = $1 WHERE tags @> $2 AND id <> $3",
        ] {
            assert!(only(text).is_blind(&only(text).assignments[0]), "{text}");
        }
    }

    #[test]
    fn upserts_are_inserts_with_assignments() {
        let part = only(
            "insert into hits (page, n) values (lower($1), 1) on conflict (page) do update set n = \
                hits.n + excluded.n where hits.n < 5",
        );
        assert_eq!(
            (part.verb, part.columns.join(","), part.values.len(), part.is_guarded),
            (Verb::Insert, "page,n".to_owned(), 2, true)
        );
        assert!(part.is_delta(&part.assignments[0]));
        let part = only("INSERT INTO t VALUES ($1) ON CONFLICT DO NOTHING");
        assert!(!part.is_guarded && part.assignments.is_empty() && part.columns.is_empty());
        let part =
            only("INSERT INTO t (n) VALUES (1) ON CONFLICT (n) DO UPDATE SET n = excluded.n");
        assert!(!part.is_delta(&part.assignments[0]) && part.is_blind(&part.assignments[0]));
    }

    #[test]
    fn parts_inside_with_are_found() {
        let text = "WITH gone AS (DELETE FROM a WHERE x = 1 RETURNING *) INSERT INTO b (x) SELECT \
            x FROM gone FOR UPDATE";
        let found: Vec<_> = parts(text)
            .iter()
            .map(|part| (part.verb, part.table.clone(), part.is_locking))
            .collect();
        assert_eq!(
            found,
            [
                (Verb::Delete, "a".to_owned(), false),
                (Verb::Insert, "b".to_owned(), false),
                (Verb::Select, "gone".to_owned(), true)
            ]
        );
        assert!(
            parts("SELECT 1").is_empty()
                && parts("VALUES (1)").is_empty()
                && parts("UPDATE").is_empty()
        );
    }
}
