//! The two compact lists of Slurm's environment: host names, and tasks for each node.

/// The first host of a list such as `node[01-04,7],login`, whose brackets stand for all numbers in them.
pub fn first_host(list: &str) -> Option<String> {
    let end = list
        .char_indices()
        .scan(0_i32, |depth, (at, c)| {
            *depth += i32::from(c == '[') - i32::from(c == ']');
            Some((at, c, *depth))
        })
        .find(|&(_, c, depth)| c == ',' && depth == 0)
        .map_or(list.len(), |(at, ..)| at);
    let mut rest = &list[..end];
    let mut host = String::new();
    // A name may have several brackets, as in rack[1-2]node[1-8]; the first of each is the first host.
    while let Some((before, bracket)) = rest.split_once('[') {
        let (numbers, behind) = bracket.split_once(']')?;
        let first = numbers.split([',', '-']).next()?;
        if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        host += before;
        host += first;
        rest = behind;
    }
    host += rest;
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
    (!host.is_empty() && host.chars().all(plain)).then_some(host)
}

/// Tasks on node `node` by a list such as `4(x2),3`: four on each of two nodes, three on the next.
pub fn tasks_on_node(list: &str, node: usize) -> Option<usize> {
    let mut before = 0_usize;
    for item in list.split(',') {
        let (tasks, nodes) = match item.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse::<usize>().ok()?),
            None => (item, 1),
        };
        before = before.checked_add(nodes)?;
        if node < before {
            return tasks.parse().ok();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_host_of_a_list() {
        for (list, want) in [
            ("node1", Some("node1")),
            ("node1,node2", Some("node1")),
            ("node[01-04,7]", Some("node01")),
            ("node[7,01-04],login", Some("node7")),
            ("gnode[10,20,25,37]", Some("gnode10")),
            ("rack[1-2]node[08-16].lan,other[1-2]", Some("rack1node08.lan")),
            ("a-b_c.example.org", Some("a-b_c.example.org")),
            ("", None),
            ("node[", None),
            ("node[]", None),
            ("node[a-b]", None),
            ("node]1", None),
            ("(null)", None),
        ] {
            assert_eq!(first_host(list).as_deref(), want, "{list}");
        }
    }

    #[test]
    fn tasks_of_each_node() {
        for (list, want) in [
            ("4", &[Some(4), None][..]),
            ("4(x2),3", &[Some(4), Some(4), Some(3), None]),
            ("1,2(x1),5", &[Some(1), Some(2), Some(5), None]),
            ("", &[None]),
            ("4(x", &[None]),
            ("four", &[None]),
        ] {
            let got: Vec<_> = (0..want.len()).map(|node| tasks_on_node(list, node)).collect();
            assert_eq!(got, want, "{list}");
        }
    }
}
