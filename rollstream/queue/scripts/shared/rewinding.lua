-- rewinding: drops what a rewind left live against its checkpoint, a page a call: thousands of groups
-- keep nobody waiting. `rewinding` of the run says where the next page begins; absent, all is done.
-- uses: ending
-- gives: drop_rewound
local REWIND_PAGE, REWIND_MEMBERS, REWIND_SCANS = 64, 512, 8 -- groups, their members, looks at a set

-- Returns how many were seen, how many lay beyond the window, and whether there is more to drop.
local function drop_rewound(cursor)
  local run = read(M, 'frontier', 'base', 'W')
  local frontier, base = tonumber(run.frontier), tonumber(run.base)
  local seen, beyond, members, window_end = 0, 0, 0, frontier + tonumber(run.W)
  for _ = 1, REWIND_SCANS do
    local reply = call('SSCAN', K .. 'gs', cursor, 'COUNT', 128)
    for _, gid in ipairs(reply[2]) do
      local id = tonumber(gid)
      if seen + beyond >= REWIND_PAGE or members >= REWIND_MEMBERS then
        call('HSET', M, 'rewinding', cursor)
        return seen, beyond, true
      end
      if is_terminal(id, frontier, base) then
        members = members
          + (end_group(gid, 'dropped', 'seen', 'the checkpoint counts it as ended', true) or 0)
        seen = seen + 1
      elseif id >= window_end then
        members = members
          + (end_group(gid, 'dropped', 'withdrawn', 'beyond the window after a rewind', true) or 0)
        beyond = beyond + 1
      end
    end
    cursor = reply[1]
    if cursor == '0' then
      call('HDEL', M, 'rewinding')
      return seen, beyond, false
    end
  end
  call('HSET', M, 'rewinding', cursor)
  return seen, beyond, true
end
