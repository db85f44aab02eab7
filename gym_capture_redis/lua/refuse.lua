-- Records that the engine refused a call before generating, and settles its intent.
-- 1  incarnation to give the rollout if it is new
-- 2  incarnation of the attempt that the call belongs to, or '' for whichever is there
-- 3  call
-- 4  the beginning of the call's row: 'x', refusal code, NUL
-- 5  the rest of it: digest and details
-- Reply    OK | SAME (refused with this code already) | OTHER_CODE (nothing changed) |
--          CONFLICT (recorded already: the rollout is now incomplete) | FROZEN | RETIRED
-- Repeat   safe: SAME
local expected, call, code = arg(2), arg(3), arg(4)
local row_field = 'c:' .. call
local state, err, known = load_state(row_field)
if err then return err end
if expected ~= '' and (not state or state.incarnation ~= expected) then return reply('RETIRED', state) end
local row = known[1]
if state then
  if state.status == 'retired' then return reply('RETIRED', state) end
  if row and string.sub(row, 1, #code) == code then return reply('SAME', state) end
  if state.status == 'frozen' then return reply('FROZEN', state) end
  keep(state)
  if row and string.sub(row, 1, 1) == 'x' then return reply('OTHER_CODE', state) end
  if row and row ~= 'n' then
    mark_failure(state, call, 'conflict')
    return reply('CONFLICT', state)
  end
else
  state = new_state(arg(1))
end
if row then state.intents = state.intents - 1 end
state.version = state.version + 1
state.refusals = state.refusals + 1
local trace = next_step(state)
write(state, trace, '0:x:' .. call, row_field, code .. arg(5))
return reply('OK', state)
